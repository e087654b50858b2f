/* test.cu: what runs CUDA on a CPU, against plain computations; and errors planted in kernels, each of which must be
 * found.
 *
 * Every planted error runs in a child of its own, which must end as a failure that names the kernel. What no single run
 * can convict (an order that no event ensures) must give other bits under another seed.
 * The last line is `N passed, N failed`; the program ends with 1 when a check failed. See the Makefile beside it.
 */
#include "test.h"
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <pthread.h>

static float index_value(size_t i) { return (float)i; }

// ---------------------------------------------------------------------------
// primitives: one warp, each result beside its definition

__global__ void warp_primitives(unsigned *out) { // (16, 32)
    unsigned lane = threadIdx.x, all = 0xFFFFFFFFu;
    out[0 * 32 + lane] = __shfl_sync(all, lane * 3, 7);
    out[1 * 32 + lane] = __shfl_sync(all, lane * 3, 5, 8);
    out[2 * 32 + lane] = __shfl_up_sync(all, lane, 3);
    out[3 * 32 + lane] = __shfl_down_sync(all, lane, 3, 16);
    out[4 * 32 + lane] = __shfl_xor_sync(all, lane, 21);
    out[5 * 32 + lane] = __ballot_sync(all, lane % 3 == 0);
    out[6 * 32 + lane] = (unsigned)__any_sync(all, lane == 9) + 2u * (unsigned)__all_sync(all, lane < 32) +
                         4u * (unsigned)__all_sync(all, lane < 31);
    out[7 * 32 + lane] = lane < 16 ? __ballot_sync(0x0000FFFFu, lane & 1) : __ballot_sync(0xFFFF0000u, lane & 2);
    double d = __shfl_xor_sync(all, 0.5 + lane, 1);
    out[8 * 32 + lane] = (unsigned)(2 * d);
    unsigned long long wide = __shfl_down_sync(all, (unsigned long long)lane << 33, 1);
    out[9 * 32 + lane] = (unsigned)(wide >> 33);
    float sum = (float)lane;
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(all, sum, o);
    out[10 * 32 + lane] = (unsigned)sum;
    out[11 * 32 + lane] =
        (unsigned)__shfl_xor_sync(all, -(int)lane, 3) + (unsigned)__shfl_sync(all, (long long)lane, 31);
    if (lane < 8) out[12 * 32 + lane] = __shfl_down_sync(0xFFu, lane, 1, 8);
    else out[12 * 32 + lane] = 0;
    __syncwarp();
    out[13 * 32 + lane] = __popc(lane) + 100u * (unsigned)__clz((int)lane) + 10000u * (unsigned)__ffs((int)lane);
    out[14 * 32 + lane] = __float_as_uint(__saturatef(lane * 0.1f - 1)) ^ __umul24(lane, 0x1000003) ^ __brev(lane) ^
                          __umulhi(lane << 20, 1u << 20);
    out[15 * 32 + lane] = __byte_perm(0x33221100, 0x77665544, 0x7410) + __funnelshift_l(lane, lane, 5) +
                          (unsigned)min(3, (int)lane) + max(5u, lane);
}

static void test_warp() {
    unsigned *d, h[16][32];
    MUST(cudaMalloc(&d, sizeof h));
    RUN(warp_primitives, 1, 32, 0, 0, d);
    MUST(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
    int bad[16] = {0};
    for (unsigned l = 0; l < 32; l++) {
        float s = l * 0.1f - 1;
        s = s < 0 ? 0 : s > 1 ? 1 : s;
        unsigned reversed = 0, bits;
        for (int i = 0; i < 32; i++) reversed |= (l >> i & 1) << (31 - i);
        memcpy(&bits, &s, 4);
        unsigned want[16] = {21,
                             (l / 8 * 8 + 5) * 3,
                             l < 3 ? l : l - 3,
                             l % 16 < 13 ? l + 3 : l,
                             l ^ 21,
                             0x49249249u,
                             3,
                             l < 16 ? 0xAAAAu : 0xCCCC0000u,
                             2 * (l ^ 1) + 1,
                             l < 31 ? l + 1 : l,
                             496,
                             31 - (l ^ 3),
                             l < 7    ? l + 1
                             : l == 7 ? 7
                                      : 0,
                             (unsigned)__builtin_popcount(l) + 100u * (unsigned)(l ? __builtin_clz(l) : 32) +
                                 10000u * (unsigned)__builtin_ffs((int)l),
                             bits ^ (l * 3) ^ reversed ^ (l << 8),
                             0x77441100u + (l << 5 | l >> 27) + (l < 3 ? l : 3) + (l > 5 ? l : 5)};
        for (int i = 0; i < 16; i++) bad[i] += h[i][l] != want[i];
    }
    for (int i = 0; i < 16; i++) check(!bad[i], "warp primitives, row %d: %d of 32 lanes differ", i, bad[i]);
    MUST(cudaFree(d));
}

__global__ void block_primitives(int *out, int *counts, float *sums) { // out (blocks, 4); counts (4); sums (1)
    SHARED(int, reversed, 96);
    SHARED(float, other, 3);
    DYN_SHARED(int, dynamic);
    int t = (int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
    reversed[95 - t] = t;
    dynamic[t] = 2 * t;
    if (t < 3) other[t] = 1.5f;
    __syncthreads();
    int mine = reversed[t] == 95 - t && dynamic[95 - t] == 2 * (95 - t) && other[t % 3] == 1.5f;
    int count = __syncthreads_count(mine && t % 2), some = __syncthreads_or(t == 50), every = __syncthreads_and(mine);
    int block = (int)(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
    if (t == 0) {
        int *o = out + 4 * block;
        o[0] = count;
        o[1] = some;
        o[2] = every;
        o[3] = (int)((size_t)dynamic % 128);
    }
    atomicAdd(&counts[0], 1);
    atomicMax(&counts[1], t);
    atomicMin(&counts[2], -t);
    atomicOr(&counts[3], 1 << block);
    atomicAdd(sums, 0.25f);
}

static void test_block() {
    int *out, *counts, h[12 * 4], c[4];
    float *sums;
    MUST(cudaMalloc(&out, sizeof h));
    MUST(cudaMalloc(&counts, sizeof c));
    MUST(cudaMalloc(&sums, 4));
    MUST(cudaMemsetAsync(counts, 0, sizeof c, 0));
    MUST(cudaMemsetAsync(sums, 0, 4, 0));
    RUN(block_primitives, dim3(2, 3, 2), dim3(8, 4, 3), 96 * 4, 0, out, counts, sums);
    MUST(cudaMemcpy(h, out, sizeof h, cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy(c, counts, sizeof c, cudaMemcpyDeviceToHost));
    int bad = 0;
    for (int i = 0; i < 12; i++) bad += h[4 * i] != 48 || h[4 * i + 1] != 1 || h[4 * i + 2] != 1 || h[4 * i + 3] != 0;
    check(!bad, "barriers that count, shared memory static and dynamic, three dimensions: %d of 12 blocks differ", bad);
    check(c[0] == 1152 && c[1] == 95 && c[2] == -95 && c[3] == 4095 && host_floats(sums, 1)[0] == 288,
          "atomics: %d %d %d %d", c[0], c[1], c[2], c[3]);
    MUST(cudaFree(out));
    MUST(cudaFree(counts));
    MUST(cudaFree(sums));
}

__global__ void cached(float4 *y, const float4 *x, __nv_bfloat162 *z, unsigned long long *n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 v = __ldcs(&x[i]), w = __ldg(&x[i]);
    v.x = __expf(v.x) + w.y;
    v.y = exp2f(v.y);
    v.z = rsqrtf(v.z * v.z + 1);
    v.w = fmaf(v.w, __fdividef(v.w, 3), __frcp_rn(4));
    __stcs(&y[i], v);
    z[i] = __floats2bfloat162_rn(w.x, w.y);
    if (atomicCAS(&n[0], (unsigned long long)i, (unsigned long long)i) == i)
        atomicExch(&n[1], (unsigned long long)i + 1);
}

static void test_cached() {
    enum { N = 256 };
    float *x = device_floats(4 * N, small), *y = device_floats(4 * N, nullptr), *z = device_floats(N, nullptr);
    unsigned long long *n, zero[2] = {17, 0}, got[2];
    MUST(cudaMalloc(&n, sizeof zero));
    MUST(cudaMemcpy(n, zero, sizeof zero, cudaMemcpyHostToDevice));
    RUN(cached, 4, 64, 0, 0, (float4 *)y, (const float4 *)x, (__nv_bfloat162 *)z, n);
    std::vector<float> h = host_floats(y, 4 * N), b = host_floats(z, N);
    MUST(cudaMemcpy(got, n, sizeof got, cudaMemcpyDeviceToHost));
    double worst = 0;
    int bad = 0;
    for (size_t i = 0; i < N; i++) {
        float a[4];
        for (size_t j = 0; j < 4; j++) a[j] = small(4 * i + j);
        double want[4] = {exp(a[0]) + a[1], exp2(a[1]), 1 / sqrt(a[2] * a[2] + 1), (double)a[3] * (a[3] / 3) + 0.25};
        for (size_t j = 0; j < 4; j++) worst = fmax(worst, fabs(h[4 * i + j] - want[j]));
        uint32_t low, high, both;
        memcpy(&low, &a[0], 4);
        memcpy(&high, &a[1], 4);
        memcpy(&both, &b[i], 4);
        bad += both != (low >> 16 | (high & 0xFFFF0000u));
    }
    check(worst < 1e-6, "cached loads and stores, fast maths: off by %.1e (bound 1e-6)", worst);
    check(!bad, "pairs of bf16: %d of %d differ", bad, N);
    check(got[0] == 17 && got[1] == 18, "atomicCAS, atomicExch");
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFree(z));
    MUST(cudaFree(n));
    int rounded = 0;
    for (uint32_t u = 0; u < 1u << 20;
         u++) { // every 4093rd bit pattern: the nearest of the two neighbours, ties to even
        uint32_t bits = u * 4093u, low = bits & 0xFFFF0000u;
        float f, down, up;
        uint32_t next = low + 0x10000u;
        memcpy(&f, &bits, 4);
        memcpy(&down, &low, 4);
        memcpy(&up, &next, 4);
        unsigned short got_bits = __bfloat16_as_ushort(__float2bfloat16_rn(f));
        if (isnan(f)) {
            rounded += got_bits != 0x7FFF;
            continue;
        }
        double half = (double)f - down, other = (isinf(up) ? copysign(ldexp(1, 128), up) : (double)up) - f;
        bool take_up = fabs(other) < fabs(half) || (fabs(other) == fabs(half) && (low >> 16 & 1));
        rounded += !isinf(f) && got_bits != (take_up ? next >> 16 : low >> 16);
    }
    check(!rounded, "rounding to bf16: %d of 2^20 differ", rounded);
}

// ---------------------------------------------------------------------------
// tensor cores: ldmatrix and mma by their definitions, then a product as a real kernel writes it

__global__ void fragments(uint32_t *out) { // (4, 32, 4)
    SHARED(uint16_t, tile, 32 * 8);
    unsigned lane = threadIdx.x;
    for (int i = 0; i < 8; i++) tile[lane * 8 + i] = (uint16_t)(lane * 8 + i);
    __syncwarp();
    uint32_t r[4], s[2];
    ptx_ldmatrix_x4(r, tile + lane * 8);
    for (int i = 0; i < 4; i++) out[lane * 4 + i] = r[i];
    ptx_ldmatrix_x4_trans(r, tile + lane * 8);
    for (int i = 0; i < 4; i++) out[128 + lane * 4 + i] = r[i];
    ptx_ldmatrix_x2(s, tile + lane % 16 * 8);
    for (int i = 0; i < 2; i++) out[256 + lane * 4 + i] = s[i];
    ptx_ldmatrix_x2_trans(s, tile + lane % 16 * 8);
    for (int i = 0; i < 2; i++) out[384 + lane * 4 + i] = s[i];
}

static void test_fragments() {
    uint32_t *d, h[4][32][4];
    MUST(cudaMalloc(&d, sizeof h));
    RUN(fragments, 1, 32, 0, 0, d);
    MUST(cudaMemcpy(h, d, sizeof h, cudaMemcpyDeviceToHost));
    int bad = 0;
    for (unsigned v = 0; v < 4; v++)
        for (unsigned l = 0; l < 32; l++)
            for (unsigned i = 0; i < (v < 2 ? 4u : 2u); i++) {
                unsigned row = l / 4, column = l % 4 * 2;
                uint32_t plain = (i * 64 + row * 8 + column) | (i * 64 + row * 8 + column + 1) << 16;
                uint32_t turned = (i * 64 + column * 8 + row) | (i * 64 + (column + 1) * 8 + row) << 16;
                bad += h[v][l][i] != (v % 2 ? turned : plain);
            }
    check(!bad, "ldmatrix x4, x2, plain and transposed: %d of 384 registers differ", bad);
    MUST(cudaFree(d));
}

/* C (M, N) = A (M, K) · B (K, N), bf16 into fp32: 64 by 64 a block, 4 warps of 16 rows, two stages of cp.async. */
template <bool WAITS>
__global__ void __launch_bounds__(128) product(float *__restrict__ c, const __nv_bfloat16 *__restrict__ a,
                                               const __nv_bfloat16 *__restrict__ b, int M, int N, int K) {
    enum { TM = 64, TN = 64, TK = 32, PAD = 8 };
    DYN_SHARED(__nv_bfloat16, shared); // two stages of A (TM, TK + PAD) and B (TK, TN + PAD)
    const int stage_elements = TM * (TK + PAD) + TK * (TN + PAD);
    const int t = (int)threadIdx.x, warp = t / 32, lane = t % 32, m0 = (int)blockIdx.y * TM, n0 = (int)blockIdx.x * TN;
    auto load = [&](int stage, int k0) {
        __nv_bfloat16 *sa = shared + stage * stage_elements, *sb = sa + TM * (TK + PAD);
        for (int i = t; i < TM * TK / 8; i += 128) {
            int row = i / (TK / 8), column = i % (TK / 8) * 8;
            ptx_cp_async(sa + row * (TK + PAD) + column, a + (int64_t)(m0 + row) * K + k0 + column,
                         m0 + row < M && k0 + column < K);
        }
        for (int i = t; i < TK * TN / 8; i += 128) {
            int row = i / (TN / 8), column = i % (TN / 8) * 8;
            ptx_cp_async(sb + row * (TN + PAD) + column, b + (int64_t)(k0 + row) * N + n0 + column,
                         k0 + row < K && n0 + column < N);
        }
        ptx_cp_async_commit();
    };
    float sum[8][4] = {};
    int steps = (K + TK - 1) / TK;
    load(0, 0);
    for (int s = 0; s < steps; s++) {
        if (s + 1 < steps) load((s + 1) % 2, (s + 1) * TK);
        if (WAITS) {
            if (s + 1 < steps) ptx_cp_async_wait<1>();
            else ptx_cp_async_wait<0>();
        }
        __syncthreads();
        const __nv_bfloat16 *sa = shared + s % 2 * stage_elements, *sb = sa + TM * (TK + PAD);
        for (int k = 0; k < TK; k += 16) {
            uint32_t fa[4];
            ptx_ldmatrix_x4(fa, sa + (warp * 16 + lane % 16) * (TK + PAD) + k + lane / 16 * 8);
            for (int n = 0; n < 8; n += 2) {
                uint32_t fb[4];
                ptx_ldmatrix_x4_trans(fb, sb + (k + lane % 16) * (TN + PAD) + n * 8 + lane / 16 * 8);
                const uint32_t b0[2] = {fb[0], fb[1]}, b1[2] = {fb[2], fb[3]};
                ptx_mma_bf16(sum[n], fa, b0);
                ptx_mma_bf16(sum[n + 1], fa, b1);
            }
        }
        __syncthreads();
    }
    if (!WAITS) ptx_cp_async_wait<0>(); // too late
    for (int n = 0; n < 8; n++)
        for (int i = 0; i < 4; i++) {
            int row = m0 + warp * 16 + lane / 4 + i / 2 * 8, column = n0 + n * 8 + lane % 4 * 2 + i % 2;
            if (row < M && column < N) c[(int64_t)row * N + column] = sum[n][i];
        }
}
enum { PRODUCT_SHARED = 2 * (64 * 40 + 32 * 72) * 2 }; // bytes

static __nv_bfloat16 *device_bf16(size_t count) {
    std::vector<__nv_bfloat16> h(count);
    for (size_t i = 0; i < count; i++) h[i] = __float2bfloat16(small(i));
    __nv_bfloat16 *d;
    MUST(cudaMalloc(&d, count * 2));
    MUST(cudaMemcpy(d, h.data(), count * 2, cudaMemcpyHostToDevice));
    return d;
}

template <bool WAITS> static std::vector<float> run_product(int M, int N, int K) {
    __nv_bfloat16 *a = device_bf16((size_t)(M * K)), *b = device_bf16((size_t)(K * N));
    float *c = device_floats((size_t)(M * N), nullptr);
    RUN((product<WAITS>), dim3((unsigned)(N + 63) / 64, (unsigned)(M + 63) / 64), 128, PRODUCT_SHARED, 0, c, a, b, M, N,
        K);
    std::vector<float> h = host_floats(c, (size_t)(M * N));
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    return h;
}

static void test_product() {
    static const int shapes[][3] = {{64, 64, 32}, {65, 72, 40}, {1, 8, 8}, {100, 136, 88}, {150, 64, 200}};
    for (const int *s : shapes) {
        int M = s[0], N = s[1], K = s[2];
        std::vector<float> c = run_product<true>(M, N, K);
        double worst = 0;
        for (int i = 0; i < M; i++)
            for (int j = 0; j < N; j++) {
                double x = 0;
                for (int k = 0; k < K; k++) x += (double)small((size_t)(i * K + k)) * small((size_t)(k * N + j));
                worst = fmax(worst, fabs(x - c[(size_t)(i * N + j)]));
            }
        check(worst == 0, "cp.async, ldmatrix, mma: (%d, %d, %d) off by %g (sums are exact in fp32)", M, N, K, worst);
    }
    double start = emu::now();
    run_product<true>(256, 256, 256);
    check(1, "  ... at %.2f GFLOP/s", 2e-9 * 256 * 256 * 256 / (emu::now() - start));
}

// ---------------------------------------------------------------------------
// streams: what events order comes in that order, under every seed

__global__ void add(float *y, const float *x, float a, int n) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = y[i] * a + x[i];
}

/* Two streams hand a buffer to and fro; `waits` 0 leaves out one wait. */
static uint64_t ping_pong(int waits) {
    enum { N = 300 };
    float *x = device_floats(N, small), *y = device_floats(N, small), *pinned;
    cudaStream_t s[2];
    cudaEvent_t e;
    MUST(cudaStreamCreateWithFlags(&s[0], cudaStreamNonBlocking));
    MUST(cudaStreamCreateWithFlags(&s[1], cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    MUST(cudaMallocHost(&pinned, N * 4));
    for (int i = 0; i < 6; i++) {
        RUN(add, 3, 128, 0, s[i % 2], y, x, 0.5f + i, N);
        MUST(cudaEventRecord(e, s[i % 2]));
        if (waits || i != 3) MUST(cudaStreamWaitEvent(s[(i + 1) % 2], e, 0));
    }
    MUST(cudaMemcpyAsync(pinned, y, N * 4, cudaMemcpyDeviceToHost, s[0]));
    MUST(cudaStreamSynchronize(s[0]));
    uint64_t h = fingerprint(1, pinned, N * 4);
    MUST(cudaStreamDestroy(s[0]));
    MUST(cudaStreamDestroy(s[1]));
    MUST(cudaEventDestroy(e));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFreeHost(pinned));
    return h;
}

/* The default stream and one that waits for it, without events; and red zones that come and go in a stream's order. */
static uint64_t default_stream_and_zones() {
    float *x = device_floats(128, small), *y = device_floats(128, small);
    cudaStream_t s;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamDefault));
    for (int i = 0; i < 6; i++) RUN(add, 1, 128, 0, i % 3 ? s : 0, y, x, 0.5f + (float)i, 128);
    cuda_on_cpu_red_zone(x + 64, 256, s);
    RUN(add, 1, 64, 0, s, y, x, 2.0f, 64);
    cuda_on_cpu_forget_zones(x, 512, s);
    MUST(cudaMemsetAsync(x, 0, 512, s));
    RUN(add, 1, 128, 0, 0, y, x, 3.0f, 128);
    std::vector<float> h = host_floats(y, 128);
    MUST(cudaStreamDestroy(s));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    return fingerprint(1, h.data(), 512);
}

static void add_one(void *p) { ++*(int *)p; }
static void call_api(void *p) { *(cudaError_t *)p = cudaDeviceSynchronize(); }

static void test_streams() {
    check(!different_bits([] { return ping_pong(1); }),
          "two streams that wait for each other: %d seeds give equal bits", SEEDS);
    check(!different_bits(default_stream_and_zones),
          "the default stream and one that waits for it, red zones in their order: %d seeds give equal bits", SEEDS);
    cudaStream_t s;
    cudaEvent_t from, to;
    float *pinned, *d = device_floats(4, nullptr), ms = -1, back[4] = {0};
    int calls = 0;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    MUST(cudaEventCreateWithFlags(&from, cudaEventDefault));
    MUST(cudaEventCreateWithFlags(&to, cudaEventDefault));
    MUST(cudaHostAlloc(&pinned, 16, cudaHostAllocDefault));
    MUST(cudaEventRecord(from, s));
    MUST(cudaMemsetAsync(d, 0, 16, s));
    MUST(cudaLaunchHostFunc(s, add_one, &calls));
    MUST(cudaEventRecord(to, s));
    check(cudaEventElapsedTime(&ms, from, to) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady && !calls,
          "nothing runs before it is waited for");
    int polls = 0;
    while (cudaEventQuery(to) == cudaErrorNotReady) polls++;
    check(cudaGetLastError() == cudaErrorNotReady && calls == 1 && polls, "an event is reached by asking for it");
    MUST(cudaEventElapsedTime(&ms, from, to));
    check(fabsf(ms - 0.005f - 0.0000016f) < 1e-6f && cudaStreamQuery(s) == cudaSuccess, "time between events: %g ms",
          ms);
    float pageable[4] = {1, 2, 3, 4};
    for (int i = 0; i < 4; i++) pinned[i] = 5;
    MUST(cudaMemcpyAsync(d, pageable, 8, cudaMemcpyHostToDevice, s));
    MUST(cudaMemcpyAsync(d + 2, pinned, 8, cudaMemcpyHostToDevice, s));
    pageable[0] = 100;
    pinned[0] = 6;
    MUST(cudaMemcpyAsync(back, d, 16, cudaMemcpyDeviceToHost, s)); // pageable: done when it returns
    check(back[0] == 1 && back[1] == 2 && back[2] == 6 && back[3] == 5,
          "a pageable source is read at the call, a pinned one later");
    MUST(cudaMemcpy2DAsync(d, 4, pageable + 1, 8, 4, 2, cudaMemcpyHostToDevice, s));
    MUST(cudaMemcpy2DAsync(back, 8, d, 4, 4, 2, cudaMemcpyDefault, s));
    check(back[0] == 2 && back[1] == 2 && back[2] == 4, "copies of rows");
    MUST(cudaEventRecord(to, s));
    MUST(cudaEventSynchronize(to));
    cudaError_t inside = cudaSuccess;
    MUST(cudaLaunchHostFunc(s, call_api, &inside));
    MUST(cudaStreamSynchronize(s));
    check(inside == cudaErrorNotPermitted, "a host function may not call the API");
    MUST(cudaEventDestroy(from));
    check(cudaEventRecord(from, s) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "an event that is gone is refused");
    MUST(cudaFree(d));
    MUST(cudaFreeHost(pinned));
    MUST(cudaStreamDestroy(s));
    MUST(cudaEventDestroy(to));
}

/* A trace by the logical clock, us: two streams that run side by side, then one that waits for the other. */
static struct { float wide, narrow, copied, waited, host; } trace;

static uint64_t trace_of_two_streams() {
    float *x = device_floats(4096, small), *y = device_floats(4096, small), *z = device_floats(4096, small), *pinned;
    cudaStream_t s[2];
    cudaEvent_t e[8];
    int least = 0, greatest = 0, priority = 0;
    MUST(cudaMallocHost(&pinned, 16384));
    MUST(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    MUST(cudaStreamCreateWithPriority(&s[0], cudaStreamNonBlocking, greatest - 3));
    MUST(cudaStreamCreateWithPriority(&s[1], cudaStreamNonBlocking, least));
    MUST(cudaStreamGetPriority(s[0], &priority));
    if (least != 0 || greatest != -5 || priority != -5) return 0;
    for (cudaEvent_t &i : e) MUST(cudaEventCreate(&i));
    MUST(cudaEventRecord(e[0], s[0]));
    RUN(add, 40, 1024, 0, s[0], y, x, 0.5f, 4096); // 2 + 40.96
    MUST(cudaEventRecord(e[1], s[0]));
    MUST(cudaEventRecord(e[2], s[1]));
    RUN(add, 32, 128, 0, s[1], z, x, 2.0f, 4096); // 2 + 4.096, at the same time
    MUST(cudaEventRecord(e[3], s[1]));
    MUST(cudaStreamWaitEvent(s[1], e[1], 0));
    MUST(cudaMemcpyAsync(pinned, y, 16384, cudaMemcpyDeviceToHost, s[1])); // 2 + 1.6384, behind s[0]
    MUST(cudaEventRecord(e[4], s[1]));
    while (cudaEventQuery(e[4]) == cudaErrorNotReady) {}
    cudaGetLastError();                // perhaps that it was asked too early
    MUST(cudaEventRecord(e[5], s[0])); // the host was at e[4]
    MUST(cudaStreamSynchronize(s[0]));
    MUST(cudaEventElapsedTime(&trace.wide, e[0], e[1]));
    MUST(cudaEventElapsedTime(&trace.narrow, e[2], e[3]));
    MUST(cudaEventElapsedTime(&trace.waited, e[0], e[3]));
    MUST(cudaEventElapsedTime(&trace.copied, e[1], e[4]));
    MUST(cudaEventElapsedTime(&trace.host, e[4], e[5]));
    uint64_t h = fingerprint(1, pinned, 16384);
    for (cudaEvent_t i : e) MUST(cudaEventDestroy(i));
    MUST(cudaStreamDestroy(s[0]));
    MUST(cudaStreamDestroy(s[1]));
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFree(z));
    MUST(cudaFreeHost(pinned));
    return fingerprint(h, &trace, sizeof trace);
}

static void test_clock() {
    check(!different_bits(trace_of_two_streams), "a trace of two streams: %d seeds give equal times", SEEDS);
    auto is = [](float ms, double us) { return fabs(ms * 1e3 - us) < 1e-3; };
    check(is(trace.wide, 42.96 + 1), "a kernel of 40,960 threads and the call before it: %g ms", trace.wide);
    check(is(trace.narrow, 6.096 + 1) && is(trace.waited, 10.096),
          "one that waits for nothing runs meanwhile: %g ms, ends %g ms after the first began", trace.narrow,
          trace.waited);
    check(is(trace.copied, 3.6384), "a copy that waits for an event ends %g ms after it", trace.copied);
    check(is(trace.host, 1), "what the host queues after it has waited comes %g ms later", trace.host);
}

/* Two devices, copies between all places, and what may be used where. */
static uint64_t places() {
    cuda_on_cpu.devices = 2;
    float *p[4], back[16], zeros[16] = {0}; // device 0, device 1, mapped, pinned
    for (int i = 0; i < 2; i++) {
        MUST(cudaSetDevice(i));
        p[i] = device_floats(16, nullptr);
    }
    MUST(cudaSetDevice(0));
    MUST(cudaHostAlloc(&p[2], 64, cudaHostAllocMapped));
    MUST(cudaHostAlloc(&p[3], 64, cudaHostAllocDefault));
    for (int i = 0; i < 16; i++) p[3][i] = (float)i;
    uint64_t bad = 0;
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            if (from == to) continue;
            MUST(cudaMemcpyAsync(p[from], p[3], 64, cudaMemcpyDefault, 0)); // to itself for 3
            MUST(cudaMemcpyAsync(p[to], zeros, 64, cudaMemcpyDefault, 0));
            MUST(cudaMemcpyAsync(p[to], p[from], 64, cudaMemcpyDefault, 0));
            MUST(cudaMemcpy(back, p[to], 64, cudaMemcpyDefault));
            for (int i = 0; i < 16; i++) bad += back[i] != (float)i;
            MUST(cudaMemcpy(p[3], back, 64, cudaMemcpyDefault));
        }
    RUN(add, 1, 16, 0, 0, p[2], p[2], 1.0f, 16); // a kernel, in mapped memory
    MUST(cudaMemsetAsync(p[2] + 8, 0, 32, 0));
    MUST(cudaDeviceSynchronize());
    void *mapped = nullptr, *none = nullptr;
    bad += p[2][3] != 6 || p[2][9] != 0 || cudaHostGetDevicePointer(&mapped, p[2], 0) || mapped != p[2] ||
           cudaHostGetDevicePointer(&none, p[3], 0) != cudaErrorInvalidValue || none;
    cudaGetLastError();
    for (int i = 0; i < 2; i++) {
        MUST(cudaFree(p[i]));
        MUST(cudaFreeHost(p[2 + i]));
    }
    cuda_on_cpu.devices = 1;
    return bad;
}

static void test_devices() {
    int bad = 0;
    for (cuda_on_cpu.seed = 0; cuda_on_cpu.seed < SEEDS; cuda_on_cpu.seed++) bad += places() != 0;
    cuda_on_cpu.seed = 1;
    check(!bad, "copies between two devices, mapped and pinned memory, under %d seeds: %d wrong", SEEDS, bad);
    cuda_on_cpu.devices = 2;
    cudaStream_t s[2];
    cudaEvent_t e[2];
    float ms;
    for (int i = 0; i < 2; i++) {
        MUST(cudaSetDevice(i));
        MUST(cudaStreamCreateWithFlags(&s[i], cudaStreamNonBlocking));
        MUST(cudaEventCreate(&e[i]));
        MUST(cudaEventRecord(e[i], s[i]));
    }
    check(cudaEventRecord(e[0], s[1]) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "an event is recorded on its own device alone");
    MUST(cudaStreamWaitEvent(s[1], e[0], 0));
    MUST(cudaDeviceSynchronize());
    check(cudaEventQuery(e[0]) == cudaSuccess, "a stream waits for another device's event");
    check(cudaEventElapsedTime(&ms, e[0], e[1]) == cudaErrorInvalidResourceHandle &&
              cudaGetLastError() == cudaErrorInvalidResourceHandle,
          "no time between two devices");
    LAUNCH(add, 1, 16, 0, s[0], nullptr, nullptr, 1.0f, 0);
    check(cudaGetLastError() == cudaErrorInvalidResourceHandle, "a launch in another device's stream is refused");
    for (int i = 0; i < 2; i++) {
        MUST(cudaStreamDestroy(s[i]));
        MUST(cudaEventDestroy(e[i]));
    }
    MUST(cudaSetDevice(0));
    cuda_on_cpu.devices = 1;
}

/* Ranks that are threads: each has its stream, and passes a token to the next by an event that both know; now and then
 * functions of the host meet on all streams. */
static struct {
    pthread_barrier_t barrier, meeting;
    float *x;
    cudaEvent_t done[4];
} ring;

static void ring_meet(void *) { pthread_barrier_wait(&ring.meeting); }

static void *ring_rank(void *arg) {
    int rank = (int)(size_t)arg;
    cudaStream_t s;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int round = 0; round < 20; round++) {
        if (round % 5 == 4) MUST(cudaLaunchHostFunc(s, ring_meet, NULL));
        for (int turn = 0; turn < 4; turn++) {
            if (turn == rank) {
                MUST(cudaStreamWaitEvent(s, ring.done[(rank + 3) % 4], 0));
                RUN(add, 1, 64, 0, s, ring.x, ring.x + 64, 1.0f + (float)rank, 64);
                MUST(cudaEventRecord(ring.done[rank], s));
            }
            if (turn != rank && round % 7 == rank) MUST(cudaStreamSynchronize(s));
            pthread_barrier_wait(&ring.barrier);
        }
    }
    MUST(cudaStreamSynchronize(s));
    MUST(cudaStreamDestroy(s));
    return NULL;
}

static void test_ranks() {
    pthread_t threads[4];
    ring.x = device_floats(128, small);
    pthread_barrier_init(&ring.barrier, NULL, 4);
    pthread_barrier_init(&ring.meeting, NULL, 4);
    for (cudaEvent_t &e : ring.done) MUST(cudaEventCreateWithFlags(&e, cudaEventDisableTiming));
    for (size_t i = 0; i < 4; i++) pthread_create(&threads[i], NULL, ring_rank, (void *)i);
    for (pthread_t t : threads) pthread_join(t, NULL);
    std::vector<float> h = host_floats(ring.x, 64);
    int bad = 0;
    for (size_t i = 0; i < 64; i++) {
        float want = small(i);
        for (int k = 0; k < 80; k++) want = want * (1.0f + (float)(k % 4)) + small(64 + i);
        bad += !(want == h[i] || (isinf(want) && isinf(h[i])) || fabsf(want - h[i]) <= 1e-4f * fabsf(want));
    }
    check(!bad, "four threads on four streams, ordered by events: %d of 64 differ", bad);
    for (cudaEvent_t e : ring.done) MUST(cudaEventDestroy(e));
    MUST(cudaFree(ring.x));
}

// ---------------------------------------------------------------------------
// errors that the API returns, by itself and injected

__global__ void nothing() {}
template <int N, bool B> __global__ void templated(int *p) { *p = B ? N : -N; }

static int refused(cudaError_t want) { // what a launch left, and that it is gone then
    cudaError_t e = cudaGetLastError();
    return e == want && cudaGetLastError() == cudaSuccess;
}

static void test_errors() {
    LAUNCH(nothing, 0, 32, 0, 0);
    check(refused(cudaErrorInvalidConfiguration), "an empty grid is refused");
    LAUNCH(nothing, dim3(1, 65536), 32, 0, 0);
    check(refused(cudaErrorInvalidConfiguration), "65,536 blocks in y are refused");
    LAUNCH(nothing, 1, 1025, 0, 0);
    check(refused(cudaErrorInvalidConfiguration), "1,025 threads are refused");
    LAUNCH(nothing, 1, 32, 49153, 0);
    check(refused(cudaErrorInvalidValue), "49,153 bytes of dynamic shared memory are refused");
    check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 232449) == cudaErrorInvalidValue &&
              refused(cudaErrorInvalidValue),
          "227 KB + 1 cannot be asked for");
    MUST(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448));
    RUN(nothing, 1, 32, 232448, 0);
    MUST(cudaDeviceSynchronize());
    cuda_on_cpu.chip = 86;
    LAUNCH(nothing, 1, 32, 102000, 0);
    check(refused(cudaErrorInvalidValue), "102,000 bytes are refused on sm_86");
    cudaDeviceProp p;
    int major, minor;
    MUST(cudaGetDeviceProperties(&p, 0));
    MUST(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    MUST(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    check(p.major == 8 && p.minor == 6 && major == 8 && minor == 6 && p.sharedMemPerBlockOptin == 101376,
          "the chip is told as %s", p.name);
    cuda_on_cpu.chip = 90;

    char table[] = "registers-XXXXXX"; // here
    int fd = mkstemp(table), *d, h = 0;
    MUST(cudaMalloc(&d, 4));
    dprintf(fd, "nothing 65\ntemplated<64, true> 128\n# a comment\n");
    close(fd);
    cuda_on_cpu.registers = table;
    LAUNCH(nothing, 1, 1024, 0, 0);
    check(refused(cudaErrorLaunchOutOfResources), "65 registers for 1,024 threads are refused");
    RUN(nothing, 1, 896, 0, 0);
    LAUNCH((templated<64, true>), 1, 544, 0, 0, d);
    check(refused(cudaErrorLaunchOutOfResources), "128 registers of a template for 544 threads are refused");
    RUN((templated<64, true>), 1, 512, 0, 0, d);
    RUN((templated<32, true>), 1, 1024, 0, 0, d);
    MUST(cudaMemcpy(&h, d, 4, cudaMemcpyDeviceToHost));
    check(h == 32, "templates are launched by name");
    cuda_on_cpu.registers = nullptr;
    unlink(table);

    void *big = d;
    size_t free_bytes, total;
    cuda_on_cpu.memory = 1 << 20;
    check(cudaMalloc(&big, 2 << 20) == cudaErrorMemoryAllocation && !big && refused(cudaErrorMemoryAllocation),
          "memory ends where the setting says");
    MUST(cudaMemGetInfo(&free_bytes, &total));
    check(total == 1 << 20 && free_bytes == total - 4, "cudaMemGetInfo: %zu of %zu free", free_bytes, total);
    cuda_on_cpu.memory = 80ull << 30;
    cuda_on_cpu_fail("cudaMalloc", cudaErrorMemoryAllocation, 2);
    void *first = nullptr;
    check(!cudaMalloc(&first, 64) && cudaMalloc(&big, 64) == cudaErrorMemoryAllocation &&
              refused(cudaErrorMemoryAllocation),
          "the second call fails, as injected");
    MUST(cudaFree(first));
    cuda_on_cpu_fail("LAUNCH", cudaErrorNoKernelImageForDevice, 1);
    LAUNCH(nothing, 1, 32, 0, 0);
    check(refused(cudaErrorNoKernelImageForDevice), "a build that lacks code for the device, injected");
    int count = -1;
    cuda_on_cpu.devices = 0;
    check(cudaGetDeviceCount(&count) == cudaErrorNoDevice && !count && refused(cudaErrorNoDevice), "no device");
    cuda_on_cpu.devices = 1;
    cuda_on_cpu.devices = 2;
    MUST(cudaSetDevice(1));
    size_t free_there, free_here;
    MUST(cudaMalloc(&big, 1 << 20));
    MUST(cudaMemGetInfo(&free_there, &total));
    LAUNCH(nothing, 1, 32, 100000, 0);
    int both = refused(cudaErrorInvalidValue);
    MUST(cudaSetDevice(0));
    MUST(cudaMemGetInfo(&free_here, &total));
    RUN(nothing, 1, 32, 100000, 0);
    check(both && free_here - free_there == (1 << 20) - 4,
          "each of two devices has its memory and its kernels' attributes");
    MUST(cudaFree(big));
    cuda_on_cpu.devices = 1;
    check(cudaSetDevice(1) == cudaErrorInvalidDevice && refused(cudaErrorInvalidDevice), "no second device");

    cudaPointerAttributes a;
    float *pinned, *managed;
    MUST(cudaHostAlloc(&pinned, 64, cudaHostAllocMapped));
    MUST(cudaMallocManaged(&managed, 64));
    int right = !cudaPointerGetAttributes(&a, d) && a.type == cudaMemoryTypeDevice &&
                !cudaPointerGetAttributes(&a, pinned + 3) && a.type == cudaMemoryTypeHost;
    right &= !cudaPointerGetAttributes(&a, &a) && a.type == cudaMemoryTypeUnregistered &&
             !cudaPointerGetAttributes(&a, managed) && a.type == cudaMemoryTypeManaged;
    managed[0] = 1; // by the host
    RUN(add, 1, 1, 0, 0, managed, pinned, 3.0f, 0);
    MUST(cudaDeviceSynchronize());
    check(right && managed[0] == 1, "pointers are told apart");
    MUST(cudaFree(managed));
    MUST(cudaFreeHost(pinned));
    MUST(cudaFree(d));
    int blocks = 0;
    MUST(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 256, 50000));
    check(blocks == 4, "occupancy: %d blocks", blocks);
}

// ---------------------------------------------------------------------------
// cuBLASLt

struct Lt { // one product, column-major
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t best;
    Lt(int M, int N, int K, int ta, int tb, cudaDataType_t in, cudaDataType_t out, int pad, uint32_t alignment) {
        MUST(cublasLtCreate(&handle));
        MUST(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
        int32_t t[2] = {ta, tb};
        MUST(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &t[0], 4));
        MUST(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &t[1], 4));
        MUST(cublasLtMatrixLayoutCreate(&a, in, (uint64_t)(ta ? K : M), (uint64_t)(ta ? M : K), (ta ? K : M) + pad));
        MUST(cublasLtMatrixLayoutCreate(&b, in, (uint64_t)(tb ? N : K), (uint64_t)(tb ? K : N), (tb ? N : K) + pad));
        MUST(cublasLtMatrixLayoutCreate(&c, out, (uint64_t)M, (uint64_t)N, M + pad));
        MUST(cublasLtMatmulPreferenceCreate(&preference));
        size_t workspace = 1 << 16;
        MUST(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                  sizeof workspace));
        for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; i++)
            MUST(cublasLtMatmulPreferenceSetAttribute(preference, (cublasLtMatmulPreferenceAttributes_t)i, &alignment,
                                                      4));
        int found = 0;
        MUST(cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, c, c, preference, 1, &best, &found));
        if (found != 1) must(1, "no algorithm");
    }
    ~Lt() {
        cublasLtMatmulPreferenceDestroy(preference);
        cublasLtMatrixLayoutDestroy(c);
        cublasLtMatrixLayoutDestroy(b);
        cublasLtMatrixLayoutDestroy(a);
        cublasLtMatmulDescDestroy(op);
        cublasLtDestroy(handle);
    }
    cublasStatus_t run(float alpha, const void *A, const void *B, float beta, const void *C, void *D, void *workspace,
                       size_t bytes) {
        return cublasLtMatmul(handle, op, &alpha, A, a, B, b, &beta, C, c, D, c, &best.algo, workspace, bytes, 0);
    }
};

static std::vector<float> run_lt(int M, int N, int K, int ta, int tb, bool bf16_in, bool bf16_out, float beta,
                                 double *worst) {
    int pad = 3, size_a = ((ta ? K : M) + pad) * (ta ? M : K), size_b = ((tb ? N : K) + pad) * (tb ? K : N),
        size_c = (M + pad) * N;
    void *a = bf16_in ? (void *)device_bf16((size_t)size_a) : device_floats((size_t)size_a, small),
         *b = bf16_in ? (void *)device_bf16((size_t)size_b) : device_floats((size_t)size_b, small), *workspace;
    void *c = bf16_out ? (void *)device_bf16((size_t)size_c) : device_floats((size_t)size_c, small);
    MUST(cudaMalloc(&workspace, 1 << 16));
    {
        Lt lt(M, N, K, ta, tb, bf16_in ? CUDA_R_16BF : CUDA_R_32F, bf16_out ? CUDA_R_16BF : CUDA_R_32F, pad, 256);
        MUST(lt.run(0.5f, a, b, beta, c, c, workspace, 1 << 16));
    }
    std::vector<float> h((size_t)size_c);
    if (bf16_out) {
        std::vector<__nv_bfloat16> raw((size_t)size_c);
        MUST(cudaMemcpy(raw.data(), c, raw.size() * 2, cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < raw.size(); i++) h[i] = __bfloat162float(raw[i]);
    } else h = host_floats((float *)c, (size_t)size_c);
    for (int j = 0; j < N; j++)
        for (int i = 0; i < M + pad; i++) {
            double x = 0;
            size_t at = (size_t)(j * (M + pad) + i);
            if (i >= M) x = small(at); // between columns nothing is touched
            else {
                for (int k = 0; k < K; k++)
                    x += (double)small((size_t)(ta ? i * (K + pad) + k : k * (M + pad) + i)) *
                         small((size_t)(tb ? k * (N + pad) + j : j * (K + pad) + k));
                x = 0.5 * x + beta * small(at);
            }
            if (bf16_out) x = __bfloat162float(__float2bfloat16((float)x));
            *worst = fmax(*worst, fabs(x - h[at]));
        }
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    MUST(cudaFree(workspace));
    return h;
}

static void test_lt() {
    for (int i = 0; i < 12; i++) {
        double worst = 0;
        int M = 1 + i * 13 % 50, N = 260 - i * 23, K = 5 + i * 7;
        run_lt(M, N, K, i & 1, i >> 1 & 1, i % 3 > 0, i % 3 == 2, i & 4 ? 1.0f : 0.0f, &worst);
        check(worst == 0, "cublasLtMatmul (%d, %d, %d), transposes %d %d, %s into %s: off by %g (sums are exact)", M, N,
              K, i & 1, i >> 1 & 1, i % 3 ? "bf16" : "fp32", i % 3 == 2 ? "bf16" : "fp32", worst);
    }
    double ignored = 0;
    float *x = device_floats(64 * 64, nullptr), *y = device_floats(64 * 64, index_value),
          *workspace = device_floats(1 << 14, nullptr);
    Lt lt(16, 16, 16, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
    MUST(lt.run(1, y, y + 512, 0, x, x, workspace, 1 << 16)); // beta 0: C is not read, though it is NaN
    for (float f : host_floats(x, 256)) ignored += f;
    check(ignored == ignored, "beta 0 does not read C");
    check(lt.run(1, y, y + 512, 0, x, x, workspace, 16) == CUBLAS_STATUS_INVALID_VALUE,
          "too small a workspace is refused");
    Lt wide(16, 16, 32, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
    lt.best = wide.best;
    check(lt.run(1, y, y + 512, 0, x, x, workspace, 1 << 16) == CUBLAS_STATUS_INVALID_VALUE,
          "an algorithm for another shape is refused");
    cublasLtMatrixLayout_t thin;
    int found = 0;
    MUST(cublasLtMatrixLayoutCreate(&thin, CUDA_R_32F, 16, 16, 15));
    check(cublasLtMatmulAlgoGetHeuristic(lt.handle, lt.op, thin, lt.b, lt.c, lt.c, lt.preference, 1, &lt.best,
                                         &found) == CUBLAS_STATUS_INVALID_VALUE &&
              !found,
          "a leading dimension below the rows is refused");
    cublasLtMatrixLayoutDestroy(thin);
    cuda_on_cpu_fail("cublasLtMatmul", (cudaError_t)CUBLAS_STATUS_EXECUTION_FAILED, 1);
    check(wide.run(1, y, y + 512, 0, x, x, workspace, 1 << 16) == CUBLAS_STATUS_EXECUTION_FAILED,
          "a failure of the library, injected");
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    MUST(cudaFree(workspace));

    // an element's bits depend on its row and its column alone: corners of a large matmul are small matmuls
    static const int N = 300, M = 100, K = 777;
    float *a = device_floats((size_t)(M * K), [](size_t i) { return sinf((float)i); }),
          *b = device_floats((size_t)(K * N), [](size_t i) { return cosf((float)i); }),
          *c = device_floats((size_t)(M * N), nullptr);
    workspace = device_floats(1 << 14, nullptr);
    Lt whole(M, N, K, 1, 0, CUDA_R_32F, CUDA_R_32F, 0, 4);
    MUST(whole.run(1, a, b, 0, c, c, workspace, 1 << 16));
    std::vector<float> large = host_floats(c, (size_t)(M * N));
    int bad = 0;
    for (int m = 1; m < M; m += 33) {
        int n = 3 * m - 1;
        Lt part(m, n, K, 1, 0, CUDA_R_32F, CUDA_R_32F, 0, 4);
        MUST(part.run(1, a + (M - m) * K, b + (N - n) * K, 0, c, c, workspace, 1 << 16));
        std::vector<float> small_one = host_floats(c, (size_t)(m * n));
        for (int j = 0; j < n; j++)
            for (int i = 0; i < m; i++)
                bad += memcmp(&small_one[(size_t)(j * m + i)], &large[(size_t)((N - n + j) * M + M - m + i)], 4) != 0;
    }
    check(!bad, "parts of a product have the bits of the whole: %d differ", bad);
    double start = emu::now();
    for (int i = 0; i < 4; i++) MUST(whole.run(1, a, b, 0, c, c, workspace, 1 << 16));
    MUST(cudaDeviceSynchronize());
    check(1, "  ... at %.2f GFLOP/s", 4 * 2e-9 * M * N * K / (emu::now() - start));
    MUST(cudaFree(a));
    MUST(cudaFree(b));
    MUST(cudaFree(c));
    MUST(cudaFree(workspace));
}

// ---------------------------------------------------------------------------
// seeds

__global__ void row_sums(float *out, const float *x,
                         int columns) { // a block a row: lanes, then warps, in a fixed order
    SHARED(float, parts, 8);
    float sum = 0;
    for (int i = (int)threadIdx.x; i < columns; i += 256) sum += x[(int)blockIdx.x * columns + i];
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, o);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; i++) sum += parts[i];
        out[blockIdx.x] = sum;
    }
}

static uint64_t sums_and_product() {
    float *x = device_floats(37 * 1000, [](size_t i) { return sinf((float)i); }), *y = device_floats(37, nullptr);
    RUN(row_sums, 37, 256, 0, 0, y, x, 1000);
    std::vector<float> sums = host_floats(y, 37), c = run_product<true>(70, 72, 96);
    MUST(cudaFree(x));
    MUST(cudaFree(y));
    return fingerprint(fingerprint(1, sums.data(), sums.size() * 4), c.data(), c.size() * 4);
}

static void test_seeds() {
    check(!different_bits(sums_and_product), "reductions and products: %d seeds give equal bits", SEEDS);
}

// ---------------------------------------------------------------------------
// planted errors

/* For what only several seeds convict: the test says which kernel's result they disagree about. */
static void disagree(const char *kernel, uint64_t (*run)(void)) {
    if (!different_bits(run)) return;
    fprintf(stderr, "CUDA on a CPU: kernel %s: seeds disagree about its result\n", kernel);
    _exit(3);
}

__global__ void no_barrier(int *out) { // each reads what its neighbour has written, or has not
    SHARED(int, x, 64);
    x[threadIdx.x] = (int)threadIdx.x;
    out[threadIdx.x] = x[(threadIdx.x + 1) % 64];
}
__global__ void no_syncwarp(int *out) {
    SHARED(int, x, 32);
    for (int i = 0; i < 4; i++) {
        x[threadIdx.x] = (int)threadIdx.x + i;
        __syncwarp();
        out[i * 32 + (int)threadIdx.x] = x[threadIdx.x ^ 1];
    }
}
__global__ void only_shuffled(int *out) {
    SHARED(int, x, 32);
    x[threadIdx.x] = 1;
    int sum = __shfl_xor_sync(0xFFFFFFFFu, 1, 1);
    out[threadIdx.x] = sum + x[threadIdx.x ^ 1];
}
__global__ void divergent(int *out) {
    if (threadIdx.x < 32) __syncthreads();
    else __syncthreads();
    *out = 1;
}
__global__ void leaves_early(int *out) {
    if (threadIdx.x == 63) return;
    __syncthreads();
    *out = 1;
}
__global__ void lane_leaves(float *out) {
    if (threadIdx.x >= 20) return;
    out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, 1.0f, 1);
}
__global__ void crossed(float *out) { // half of the warp waits for the block, half for the warp
    if (threadIdx.x < 16) __syncthreads();
    else out[0] = __shfl_sync(0xFFFFFFFFu, 1.0f, 0);
}
__global__ void misaligned_vector(float *p) { p[0] = __ldg((const float4 *)(p + 1)).x; }
__global__ void misaligned_plain(float *p) { p[0] = ((volatile float4 *)(p + 1))->x; }
__global__ void misaligned_copy(const float *p) {
    DYN_SHARED(float, s);
    ptx_cp_async(s, p + 1, true);
}
__global__ void uncommitted_copy(const float *p) { // so the wait is for nothing
    DYN_SHARED(float, s);
    ptx_cp_async(s, p, true);
    ptx_cp_async_wait<0>();
}
__global__ void misaligned_row(uint32_t *out) {
    DYN_SHARED(uint16_t, s);
    uint32_t r[4];
    ptx_ldmatrix_x4(r, s + threadIdx.x * 8 + 4 * (threadIdx.x == 5));
    out[threadIdx.x] = r[0];
}
__global__ void overrun(float *p, int n) { p[n] = 1; }
__global__ void static_overrun(float *p, int n) {
    SHARED(float, s, 33);
    s[threadIdx.x + n] = 1;
    __syncwarp();
    p[threadIdx.x] = s[threadIdx.x];
}
__global__ void dynamic_overrun(float *p, int n) {
    DYN_SHARED(float, s);
    s[n + (int)threadIdx.x] = p[threadIdx.x];
}
__global__ void uninitialized(float *p) { // as if shared memory began with zeros
    SHARED(float, s, 32);
    if (threadIdx.x < 31) s[threadIdx.x] = 1;
    __syncwarp();
    p[threadIdx.x] = s[threadIdx.x];
}
__global__ void too_much_static(float *p) {
    SHARED(float, s, 12289);
    s[threadIdx.x] = *p;
}
template <typename I> __global__ void far_row(float *logits, int row, int columns) {
    logits[(I)row * (I)columns + (I)threadIdx.x] = 1;
}
__global__ void deep(float *p, int n) {
    volatile char big[4096];
    big[n % 4096] = 1;
    if (n) deep(p, n - 1);
    *p = big[n % 4096];
}

static int *device_ints(size_t n) { return (int *)device_floats(n, nullptr); }

static uint64_t device_hash(const void *d, size_t bytes) {
    std::vector<char> h(bytes);
    MUST(cudaMemcpy(h.data(), d, bytes, cudaMemcpyDeviceToHost));
    return fingerprint(1, h.data(), bytes);
}

static uint64_t reused_too_early() { // a pinned buffer is filled again before its copy has run
    static float *pinned;
    if (!pinned) MUST(cudaMallocHost(&pinned, 256));
    float *x = device_floats(64, nullptr), *y = device_floats(64, [](size_t) { return 0.0f; });
    cudaStream_t s;
    MUST(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 64; j++) pinned[j] = (float)i;
        MUST(cudaMemcpyAsync(x, pinned, 256, cudaMemcpyHostToDevice, s));
        RUN(add, 1, 64, 0, s, y, x, 1.0f, 64);
    }
    MUST(cudaStreamSynchronize(s));
    return host_floats(y, 1)[0] == 6 ? 0 : 1;
}

static void test_planted() {
    printf("planted errors, by row of README.md's table\n");
    planted("1: a stream that does not wait for another's event", "add",
            [] { disagree("add", [] { return ping_pong(0); }); });
    planted("1: a launch's error that is never read", "kernel nothing|empty", [] {
        LAUNCH(nothing, 0, 32, 0, 0);
        LAUNCH(nothing, 1, 32, 0, 0);
    });
    planted("2: a pinned buffer reused before its copy has run", "add", [] {
        if (!reused_too_early()) return;
        fprintf(stderr, "CUDA on a CPU: kernel add: read what was written into the pinned buffer later\n");
        _exit(3);
    });
    planted("3: a kernel is given host memory", "kernel add, argument 2 should be device memory|pageable", [] {
        float h[64], *d = device_floats(64, nullptr);
        RUN(add, 1, 64, 0, 0, d, h, 1.0f, 64);
    });
    planted("3: a kernel is given pinned memory that is not mapped",
            "kernel add, argument 2 should be device memory|pinned host memory", [] {
                float *h, *d = device_floats(64, nullptr);
                MUST(cudaMallocHost(&h, 256));
                RUN(add, 1, 64, 0, 0, d, h, 1.0f, 64);
            });
    planted("3: a memset of pinned memory that is not mapped",
            "the memory of cudaMemsetAsync should be device memory|pinned host memory", [] {
                float *h;
                MUST(cudaMallocHost(&h, 256));
                cudaMemsetAsync(h, 0, 256, 0);
            });
    planted("3: a memset of another device's memory",
            "the memory of cudaMemsetAsync at|memory of device 0, used by device 1", [] {
                cuda_on_cpu.devices = 2;
                float *there = device_floats(64, small);
                MUST(cudaSetDevice(1));
                cudaMemsetAsync(there, 0, 256, 0);
            });
    planted("3: a kernel is given another device's memory",
            "kernel add, argument 2 at|memory of device 0, used by device 1", [] {
                cuda_on_cpu.devices = 2;
                float *there = device_floats(64, small);
                MUST(cudaSetDevice(1));
                RUN(add, 1, 64, 0, 0, device_floats(64, small), there, 1.0f, 64);
            });
    planted("3: a copy goes the other way than it says", "the destination of cudaMemcpyAsync should be device memory",
            [] {
                float h[4], *d = device_floats(4, nullptr);
                cudaMemcpyAsync(h, d, 16, cudaMemcpyHostToDevice, 0);
            });
    planted("3: a copy is longer than its memory", "of 68 bytes begins at byte 0 of an allocation of 64", [] {
        float h[17], *d = device_floats(16, nullptr);
        cudaMemcpy(h, d, 68, cudaMemcpyDeviceToHost);
    });
    if (cuda_on_cpu.protect)
        planted("3: the host reads device memory", "host code touched byte 8 of an allocation of 64", [] {
            float *d = device_floats(16, index_value);
            printf("%g\n", d[2]);
        });
    planted("4: a missing __syncthreads", "no_barrier", [] {
        disagree("no_barrier", [] {
            static int *out = device_ints(64);
            RUN(no_barrier, 1, 64, 0, 0, out);
            return device_hash(out, 256);
        });
    });
    planted("4: a missing __syncwarp", "no_syncwarp", [] {
        disagree("no_syncwarp", [] {
            static int *out = device_ints(128);
            RUN(no_syncwarp, 1, 32, 0, 0, out);
            return device_hash(out, 512);
        });
    });
    planted("4: threads at two barriers", "kernel divergent, |same barrier|thread (", [] {
        RUN(divergent, 1, 64, 0, 0, device_ints(1));
        cudaDeviceSynchronize();
    });
    planted("4: a thread returns before the barrier", "kernel leaves_early, |__syncthreads", [] {
        RUN(leaves_early, 1, 64, 0, 0, device_ints(1));
        cudaDeviceSynchronize();
    });
    planted("4: a lane returns that a shuffle's mask names", "kernel lane_leaves, |__shfl_xor_sync", [] {
        RUN(lane_leaves, 1, 32, 0, 0, device_floats(32, nullptr));
        cudaDeviceSynchronize();
    });
    planted("4: a barrier and a shuffle wait for each other", "kernel crossed, |for good", [] {
        RUN(crossed, 1, 32, 0, 0, device_floats(32, nullptr));
        cudaDeviceSynchronize();
    });
    planted("5: cp.async is waited for too late", "product<false>", [] {
        disagree("product<false>", [] {
            std::vector<float> c = run_product<false>(64, 64, 64);
            return fingerprint(1, c.data(), c.size() * 4);
        });
    });
    planted("5: cp.async is not committed", "kernel uncommitted_copy, |ends while a cp.async", [] {
        RUN(uncommitted_copy, 1, 1, 64, 0, device_floats(64, small));
        cudaDeviceSynchronize();
    });
    planted("6: a misaligned vector", "kernel misaligned_vector, |not aligned", [] {
        RUN(misaligned_vector, 1, 1, 0, 0, device_floats(64, small));
        cudaDeviceSynchronize();
    });
    planted("6: cp.async from a misaligned address", "kernel misaligned_copy, |aligned to 16", [] {
        RUN(misaligned_copy, 1, 1, 64, 0, device_floats(64, small));
        cudaDeviceSynchronize();
    });
    planted("6: ldmatrix of a misaligned row", "kernel misaligned_row, |thread (5, 0, 0)|aligned to 16", [] {
        RUN(misaligned_row, 1, 32, 1024, 0, (uint32_t *)device_ints(64));
        cudaDeviceSynchronize();
    });
    if (CUDA_ON_CPU_RACES) {
        planted("4: a missing __syncthreads, as a race",
                "kernel no_barrier, |byte |of shared array x|no barrier between", [] {
                    RUN(no_barrier, 1, 64, 0, 0, device_ints(64));
                    cudaDeviceSynchronize();
                });
        planted("4: a missing __syncwarp, as a race", "kernel no_syncwarp, |of shared array x|no barrier between", [] {
            RUN(no_syncwarp, 1, 32, 0, 0, device_ints(128));
            cudaDeviceSynchronize();
        });
        planted("4: a shuffle in place of a __syncwarp, as a race",
                "kernel only_shuffled, |of shared array x|no barrier between", [] {
                    RUN(only_shuffled, 1, 32, 0, 0, device_ints(32));
                    cudaDeviceSynchronize();
                });
    }
#if defined(TEST_UBSAN) && !defined(__clang__) // clang 14 lets it pass
    planted("6: a misaligned vector, plainly", "kernel misaligned_plain, |UndefinedBehaviorSanitizer", [] {
        RUN(misaligned_plain, 1, 1, 0, 0, device_floats(64, small));
        cudaDeviceSynchronize();
    });
#endif
    planted("7: a tensor of an arena is overrun", "kernel overrun|red zone|byte 1024 of an allocation", [] {
        float *arena = device_floats(1024, small);
        cuda_on_cpu_red_zone(arena + 256, 256);
        RUN(overrun, 1, 1, 0, 0, arena, 256);
        cudaDeviceSynchronize();
    });
    planted("7: an allocation is overrun", "kernel overrun|red zone", [] {
        RUN(overrun, 1, 1, 0, 0, device_floats(100, small), 100);
        cudaDeviceSynchronize();
    });
    planted("7: a copy runs over a red zone", "the memory of cudaMemsetAsync|red zone", [] {
        float *arena = device_floats(1024, small);
        cuda_on_cpu_red_zone(arena + 256, 256, 0);
        cudaMemsetAsync(arena, 0, 1028, 0);
        cudaDeviceSynchronize();
    });
    planted("8: more static shared memory than 48 KB", "kernel too_much_static, |49152", [] {
        RUN(too_much_static, 1, 32, 0, 0, device_floats(1, small));
        cudaDeviceSynchronize();
    });
    planted("9: a static shared array is overrun", "kernel static_overrun, |shared array s of 132 bytes", [] {
        RUN(static_overrun, 1, 32, 0, 0, device_floats(32, small), 2);
        cudaDeviceSynchronize();
    });
    planted("9: dynamic shared memory is overrun", "kernel dynamic_overrun, |DYN_SHARED of 128 bytes", [] {
        RUN(dynamic_overrun, 1, 32, 128, 0, device_floats(32, small), 1);
        cudaDeviceSynchronize();
    });
    planted("9: shared memory is read before it is written", "uninitialized", [] {
        float *p = device_floats(32, small);
        RUN(uninitialized, 1, 32, 0, 0, p);
        if (!isnan(host_floats(p, 32)[31])) return;
        fprintf(stderr, "CUDA on a CPU: kernel uninitialized: gives a NaN\n");
        _exit(3);
    });
    planted("10: an offset over 2^31 in 32 bits", "kernel far_row<int>, |touched byte -", [] {
        float *logits = (float *)cuda_on_cpu_sparse(10ull << 30);
        RUN((far_row<int64_t>), 1, 32, 0, 0, logits, 16777, 128256); // in 64 bits it is right
        MUST(cudaDeviceSynchronize());
        RUN((far_row<int>), 1, 32, 0, 0, logits, 16777, 128256);
        cudaDeviceSynchronize();
    });
    planted("11: cuBLASLt is promised more alignment than there is", "cublasLtMatmul: B at |not aligned to 256 bytes",
            [] {
                float *x = device_floats(4096, small);
                Lt lt(16, 16, 16, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
                lt.run(1, x, x + 260, 0, x + 1024, x + 1024, x + 2048, 4096);
            });
    planted("11: cuBLASLt's D overlaps A", "cublasLtMatmul: D overlaps A", [] {
        float *x = device_floats(4096, small);
        Lt lt(16, 16, 16, 0, 0, CUDA_R_32F, CUDA_R_32F, 0, 256);
        lt.best.algo.data[5] = 0;
        lt.run(1, x, x + 512, 0, x + 192, x + 192, nullptr, 0);
    });
    planted("12: a launch that sm_86 has too little shared memory for", "kernel nothing|sm_86", [] {
        cuda_on_cpu.chip = 86;
        cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 101376);
        LAUNCH(nothing, 1, 32, 120000, 0);
        cudaDeviceSynchronize();
    });
    planted("12: a launch that the build has no code for", "kernel nothing|injected", [] {
        cuda_on_cpu_fail("LAUNCH", cudaErrorNoKernelImageForDevice, 1);
        LAUNCH(nothing, 1, 32, 0, 0);
        cudaDeviceSynchronize();
    });
    planted("a stack that is full", "kernel deep, |", [] {
        RUN(deep, 1, 1, 0, 0, device_floats(1, small), 1000);
        cudaDeviceSynchronize();
    });
    check(cudaGetLastError() == cudaSuccess, "nothing is left of it here");
    cuda_on_cpu_fail("cudaStreamSynchronize", cudaErrorIllegalAddress, 1);
    check(cudaStreamSynchronize(0) == cudaErrorIllegalAddress && cudaGetLastError() == cudaErrorIllegalAddress &&
              cudaDeviceSynchronize() == cudaErrorIllegalAddress,
          "an illegal address persists, injected");
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    test_warp();
    test_block();
    test_cached();
    test_fragments();
    test_product();
    test_streams();
    test_clock();
    test_devices();
    test_ranks();
    test_errors();
    test_lt();
    test_seeds();
    test_planted();
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
