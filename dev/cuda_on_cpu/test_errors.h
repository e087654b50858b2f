/* test_errors.h: errors that the API returns, by itself and injected. */
#ifndef TEST_ERRORS_H
#define TEST_ERRORS_H
#include "test_streams.h" // defines: add

__global__ void nothing() {}
template <int N, bool B> __global__ void templated(int *p) { *p = B ? N : -N; }

static int refused(cudaError_t want) { // what a launch left, and that it is gone then
    cudaError_t e = cudaGetLastError();
    return e == want && cudaGetLastError() == cudaSuccess;
}

static void test_refused_launches() {
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
}

static void test_forked_child() {
    int count;
    MUST(cudaGetDeviceCount(&count));
    pid_t child = fork();
    if (!child) {
        LAUNCH(nothing, 1, 32, 0, 0);
        bool launches = refused(cudaErrorInitializationError);
        _exit(launches && cudaGetDeviceCount(&count) == cudaErrorInitializationError);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 1, "a child forked after CUDA was opened cannot use it");
    MUST(cudaGetDeviceCount(&count));
}

static void test_registers() {
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
    MUST(cudaFree(d));
}

static void test_memory() {
    float *d = device_floats(1, nullptr);
    void *big = d;
    size_t free_bytes, total;
    cuda_on_cpu.memory = 1 << 20;
    check(cudaMalloc(&big, 2 << 20) == cudaErrorMemoryAllocation && !big && refused(cudaErrorMemoryAllocation),
          "memory ends where the setting says");
    MUST(cudaMemGetInfo(&free_bytes, &total));
    check(total == 1 << 20 && free_bytes == total - 4, "cudaMemGetInfo: %zu of %zu free", free_bytes, total);
    cuda_on_cpu.held = 1 << 19;
    big = d;
    MUST(cudaMemGetInfo(&free_bytes, &total));
    check(cudaMalloc(&big, 3 << 18) == cudaErrorMemoryAllocation && !big && refused(cudaErrorMemoryAllocation) &&
              total == 1 << 20 && free_bytes == total - 4 - (1 << 19),
          "other processes hold memory: %zu of %zu free", free_bytes, total);
    cuda_on_cpu.held = 0;
    cuda_on_cpu.memory = 80ull << 30;
    cuda_on_cpu_fail("cudaMalloc", cudaErrorMemoryAllocation, 2);
    void *first = nullptr;
    check(!cudaMalloc(&first, 64) && cudaMalloc(&big, 64) == cudaErrorMemoryAllocation &&
              refused(cudaErrorMemoryAllocation),
          "the second call fails, as injected");
    MUST(cudaFree(first));
    MUST(cudaFree(d));
}

static void test_device_count() {
    cuda_on_cpu_fail("LAUNCH", cudaErrorNoKernelImageForDevice, 1);
    LAUNCH(nothing, 1, 32, 0, 0);
    check(refused(cudaErrorNoKernelImageForDevice), "a build that lacks code for the device, injected");
    int count = -1;
    cuda_on_cpu.devices = 0;
    check(cudaGetDeviceCount(&count) == cudaErrorNoDevice && !count && refused(cudaErrorNoDevice), "no device");
    cuda_on_cpu.devices = 1;
    cuda_on_cpu.devices = 2;
    MUST(cudaSetDevice(1));
    void *big;
    size_t free_there, free_here, total;
    MUST(cudaMalloc(&big, 1 << 20));
    MUST(cudaMemGetInfo(&free_there, &total));
    LAUNCH(nothing, 1, 32, 100000, 0);
    int both = refused(cudaErrorInvalidValue);
    MUST(cudaSetDevice(0));
    MUST(cudaMemGetInfo(&free_here, &total));
    RUN(nothing, 1, 32, 100000, 0);
    check(both && free_here - free_there == 1 << 20, "each of two devices has its memory and its kernels' attributes");
    MUST(cudaFree(big));
    cuda_on_cpu.devices = 1;
    check(cudaSetDevice(1) == cudaErrorInvalidDevice && refused(cudaErrorInvalidDevice), "no second device");
}

/* CUDA_VISIBLE_DEVICES: which devices a process sees, and in what order. */
static void test_visible_devices() {
    cudaDeviceProp all[4], seen[2];
    int count = -1, none = -1;
    cuda_on_cpu.devices = 4;
    for (int i = 0; i < 4; i++) MUST(cudaGetDeviceProperties(&all[i], i));
    cuda_on_cpu.visible = "3,1,7,0"; // 7 is no device, and hides those after it
    cuda_on_cpu.name = "NVIDIA H200";
    MUST(cudaGetDeviceCount(&count));
    for (int i = 0; i < 2; i++) MUST(cudaGetDeviceProperties(&seen[i], i));
    int right = count == 2 && !memcmp(&seen[0].uuid, &all[3].uuid, sizeof all[3].uuid) &&
                !memcmp(&seen[1].uuid, &all[1].uuid, sizeof all[1].uuid) && !strcmp(seen[0].name, "NVIDIA H200");
    check(right && cudaSetDevice(2) == cudaErrorInvalidDevice && refused(cudaErrorInvalidDevice),
          "CUDA_VISIBLE_DEVICES=3,1,7,0 shows %d of 4 devices", count);
    cuda_on_cpu.visible = "-1";
    check(cudaGetDeviceCount(&none) == cudaErrorNoDevice && !none && refused(cudaErrorNoDevice),
          "CUDA_VISIBLE_DEVICES=-1 shows none");
    cuda_on_cpu.visible = cuda_on_cpu.name = nullptr;
    cuda_on_cpu.devices = 1;
}

static void test_pointers() {
    cudaPointerAttributes a;
    float *d = device_floats(1, nullptr), *pinned, *managed;
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
}

static void test_errors() {
    test_refused_launches();
    test_forked_child();
    test_registers();
    test_memory();
    test_device_count();
    test_visible_devices();
    test_pointers();
    int blocks = 0;
    MUST(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, nothing, 256, 50000));
    check(blocks == 4, "occupancy: %d blocks", blocks);
}
#endif
