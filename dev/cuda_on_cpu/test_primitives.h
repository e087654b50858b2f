/* test_primitives.h: primitives of warps, blocks and tensor cores, each result next to its definition; last a matmul
 * as a real kernel writes it. */
#ifndef TEST_PRIMITIVES_H
#define TEST_PRIMITIVES_H
#include "test.h"
#include <cuda_bf16.h>

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
        float s = fminf(fmaxf(l * 0.1f - 1, 0), 1);
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
                             l < 8 ? std::min(l + 1, 7u) : 0,
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
#endif
