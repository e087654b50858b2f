/* test_planted.h: errors planted in kernels and calls, by row of README.md's table; each must be found. */
#ifndef TEST_PLANTED_H
#define TEST_PLANTED_H
#include "test_errors.h" // defines: nothing
#include "test_lt.h"     // defines: Lt

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

static void planted_order() {
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
}

static void planted_places() {
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
}

static void planted_barriers() {
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
}

static void planted_copies_and_alignment() {
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
}

static void planted_races() {
    planted("4: a missing __syncthreads, as a race", "kernel no_barrier, |byte |of shared array x|no barrier between",
            [] {
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

static void planted_misaligned_plain() {
#if defined(TEST_UBSAN) && !defined(__clang__) // clang 14 lets it pass
    planted("6: a misaligned vector, plainly", "kernel misaligned_plain, |UndefinedBehaviorSanitizer", [] {
        RUN(misaligned_plain, 1, 1, 0, 0, device_floats(64, small));
        cudaDeviceSynchronize();
    });
#endif
}

static void planted_overruns() {
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
}

static void planted_refusals() {
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
}

static void test_planted() {
    printf("planted errors, by row of README.md's table\n");
    planted_order();
    planted_places();
    planted_barriers();
    planted_copies_and_alignment();
    if (CUDA_ON_CPU_RACES) planted_races();
    planted_misaligned_plain();
    planted_overruns();
    planted_refusals();
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
#endif
