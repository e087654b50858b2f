/* cuda_runtime.h: emulates the CUDA runtime, so that kernels run on a CPU: for tests, sanitizers and gdb.
 *
 * Here: the words of the language, vector types, error codes, the settings and the one way to fail. Then fibers.h (a
 * block of threads), streams.h (memory, queues, launches), events.h (streams, events), intrinsics.h and ptx.h (what
 * device code calls), and for compute capability 9.0 async.h, mbarrier.h, tma.h and wgmma.h.
 * A caller may rely on: a kernel that is right gives the same bits under every seed; one that is not, in a way that
 * README.md lists, ends the process with exit code 3 and one line that names the kernel, its block and its thread.
 * Compile with g++ or clang as C++20, -Idev/cuda_on_cpu -Wno-unknown-pragmas (unroll).
 */
#ifndef CUDA_ON_CPU
#define CUDA_ON_CPU
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define CUDA_ON_CPU_RACES 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define CUDA_ON_CPU_RACES 1
#endif
#endif
#ifdef CUDA_ON_CPU_RACES // races.h
#ifdef __clang__
#define CUDA_ON_CPU_PLAIN __attribute__((disable_sanitizer_instrumentation))
#else
#define CUDA_ON_CPU_PLAIN __attribute__((no_sanitize("thread")))
#endif
#define CUDA_ON_CPU_UNSEEN __attribute__((noinline)) CUDA_ON_CPU_PLAIN // what it touches is no race
#else
#define CUDA_ON_CPU_RACES 0
#define CUDA_ON_CPU_UNSEEN
#endif
#ifdef CUDA_ON_CPU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define CUDA_ON_CPU_ASAN 0
#endif

// ---------------------------------------------------------------------------
// words of the language; __shared__ is not among them: SHARED and DYN_SHARED declare such memory (fibers.h)

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define CUDART_VERSION 13000
#define CUDART_CB

#define CUDA_ON_CPU_VECTORS(T, name, a2, a4)                                                                           \
    struct name##1 {                                                                                                   \
        T x;                                                                                                           \
    };                                                                                                                 \
    struct __attribute__((aligned(a2))) name##2 {                                                                      \
        T x, y;                                                                                                        \
    };                                                                                                                 \
    struct name##3 {                                                                                                   \
        T x, y, z;                                                                                                     \
    };                                                                                                                 \
    struct __attribute__((aligned(a4))) name##4 {                                                                      \
        T x, y, z, w;                                                                                                  \
    };                                                                                                                 \
    static inline name##1 make_##name##1(T x) { return name##1 {x}; }                                                  \
    static inline name##2 make_##name##2(T x, T y) { return name##2 {x, y}; }                                          \
    static inline name##3 make_##name##3(T x, T y, T z) { return name##3 {x, y, z}; }                                  \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return name##4 {x, y, z, w}; }
CUDA_ON_CPU_VECTORS(signed char, char, 2, 4)
CUDA_ON_CPU_VECTORS(unsigned char, uchar, 2, 4)
CUDA_ON_CPU_VECTORS(short, short, 4, 8)
CUDA_ON_CPU_VECTORS(unsigned short, ushort, 4, 8)
CUDA_ON_CPU_VECTORS(int, int, 8, 16)
CUDA_ON_CPU_VECTORS(unsigned, uint, 8, 16)
CUDA_ON_CPU_VECTORS(long long, longlong, 16, 16)
CUDA_ON_CPU_VECTORS(unsigned long long, ulonglong, 16, 16)
CUDA_ON_CPU_VECTORS(float, float, 8, 16)
CUDA_ON_CPU_VECTORS(double, double, 16, 16)
#undef CUDA_ON_CPU_VECTORS

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};

// what device code sees of itself; real variables, so that gdb prints them
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
enum { warpSize = 32 };

// ---------------------------------------------------------------------------
// error codes, CUDA's numbers and names; those below that persist end the device's life (streams.h)

// clang-format off
#define CUDA_ON_CPU_ERRORS(E)                                                                                          \
    E(cudaSuccess, 0, "no error")                                                                                      \
    E(cudaErrorInvalidValue, 1, "invalid argument")                                                                    \
    E(cudaErrorMemoryAllocation, 2, "out of memory")                                                                   \
    E(cudaErrorInitializationError, 3, "initialization error")                                                         \
    E(cudaErrorInvalidConfiguration, 9, "invalid configuration argument")                                              \
    E(cudaErrorInvalidPitchValue, 12, "invalid pitch argument")                                                        \
    E(cudaErrorInvalidDevicePointer, 17, "invalid device pointer")                                                     \
    E(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy")                                        \
    E(cudaErrorInsufficientDriver, 35, "CUDA driver version is insufficient for CUDA runtime version")                 \
    E(cudaErrorDevicesUnavailable, 46, "CUDA-capable device(s) is/are busy or unavailable")                            \
    E(cudaErrorInvalidDeviceFunction, 98, "invalid device function")                                                   \
    E(cudaErrorNoDevice, 100, "no CUDA-capable device is detected")                                                    \
    E(cudaErrorInvalidDevice, 101, "invalid device ordinal")                                                           \
    E(cudaErrorInvalidKernelImage, 200, "device kernel image is invalid")                                              \
    E(cudaErrorNoKernelImageForDevice, 209, "no kernel image is available for execution on the device")                \
    E(cudaErrorECCUncorrectable, 214, "uncorrectable ECC error encountered")                                           \
    E(cudaErrorUnsupportedPtxVersion, 222, "the provided PTX was compiled with an unsupported toolchain.")             \
    E(cudaErrorOperatingSystem, 304, "OS call failed or operation not supported on this OS")                           \
    E(cudaErrorInvalidResourceHandle, 400, "invalid resource handle")                                                  \
    E(cudaErrorNotReady, 600, "device not ready")                                                                      \
    E(cudaErrorIllegalAddress, 700, "an illegal memory access was encountered")                                        \
    E(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch")                                   \
    E(cudaErrorLaunchTimeout, 702, "the launch timed out and was terminated")                                          \
    E(cudaErrorAssert, 710, "device-side assert triggered")                                                            \
    E(cudaErrorHostMemoryAlreadyRegistered, 712, "part or all of the requested memory range is already mapped")        \
    E(cudaErrorHostMemoryNotRegistered, 713, "pointer does not correspond to a registered memory region")              \
    E(cudaErrorHardwareStackError, 714, "hardware stack error")                                                        \
    E(cudaErrorIllegalInstruction, 715, "an illegal instruction was encountered")                                      \
    E(cudaErrorMisalignedAddress, 716, "misaligned address")                                                           \
    E(cudaErrorLaunchFailure, 719, "unspecified launch failure")                                                       \
    E(cudaErrorNotPermitted, 800, "operation not permitted")                                                           \
    E(cudaErrorNotSupported, 801, "operation not supported")                                                           \
    E(cudaErrorSystemNotReady, 802, "system not yet initialized")                                                      \
    E(cudaErrorSystemDriverMismatch, 803, "system has unsupported display driver / cuda driver combination")           \
    E(cudaErrorCompatNotSupportedOnDevice, 804, "forward compatibility was attempted on non supported HW")            \
    E(cudaErrorTimeout, 909, "wait operation timed out")                                                               \
    E(cudaErrorUnknown, 999, "unknown error")
// clang-format on

enum cudaError {
#define E(name, number, text) name = number,
    CUDA_ON_CPU_ERRORS(E)
#undef E
};
typedef cudaError cudaError_t;

inline const char *cudaGetErrorName(cudaError_t e) {
    switch ((int)e) {
#define E(name, number, text)                                                                                          \
    case number: return #name;
        CUDA_ON_CPU_ERRORS(E)
#undef E
    }
    return "unrecognized error code";
}

inline const char *cudaGetErrorString(cudaError_t e) {
    switch ((int)e) {
#define E(name, number, text)                                                                                          \
    case number: return text;
        CUDA_ON_CPU_ERRORS(E)
#undef E
    }
    return "unrecognized error code";
}
#undef CUDA_ON_CPU_ERRORS

// ---------------------------------------------------------------------------
// settings: read at start from the environment, then whatever a test sets between operations

struct Costs {                                    // of the logical clock (events.h), in microseconds
    double enqueue = 1;                           // of the host, for each operation that it queues
    double launch = 2, thread = 1e-3;             // a kernel; each thread of its grid
    double copy = 2, byte = 1e-4;                 // a copy or memset; each byte
    double product = 2, flop = 1e-6;              // a cuBLASLt product; each operation of it
    double collective = 5, exchanged_byte = 2e-4; // an NCCL operation; each byte that a member receives
};

struct CudaOnCpu {
    uint64_t seed = 1; // CUDA_ON_CPU_SEED: order of streams, blocks, warps, lanes, and when copies land; 0: as written
    int chip = 90;     // CUDA_ON_CPU_CHIP: 70, 75, 80, 86, 89 or 90, with or without sm_: compute capability and limits
    size_t memory = 80ull << 30;   // CUDA_ON_CPU_MEMORY: bytes of one device
    size_t held = 0;               // CUDA_ON_CPU_HELD: of these, bytes that other processes hold
    int devices = 1;               // CUDA_ON_CPU_DEVICES
    const char *visible = nullptr; // CUDA_VISIBLE_DEVICES: the numbers of those devices that the program sees
    int multiprocessors = 8;
    int driver = 13000, runtime = CUDART_VERSION; // CUDA_ON_CPU_DRIVER, _RUNTIME: versions that the two queries say
    const char *name = nullptr; // CUDA_ON_CPU_NAME: what the devices are called, such as "NVIDIA H200"
    int tensor_maps = 1;        // CUDA_ON_CPU_TENSOR_MAPS: the driver has cuTensorMapEncodeTiled
    const char *failures =
        nullptr; // CUDA_ON_CPU_FAIL: call:code:nth,… : that call of the API returns that code, as cuda_on_cpu_fail says
    int rough = 0;                   // CUDA_ON_CPU_ROUGH: 1 or 2: arithmetic errs as that of a GPU may (arithmetic.h)
    unsigned refused_algorithms = 0; // CUDA_ON_CPU_REFUSED_ALGORITHMS: bit i: cuBLASLt refuses to run proposal i
    int protect = !CUDA_ON_CPU_ASAN; // the host that touches device memory is caught
    const char *nccl_lose = nullptr, *nccl_error = nullptr; // CUDA_ON_CPU_NCCL_LOSE, _ERROR: RANK:N, as nccl.h says
    int nvls = 0;         // CUDA_ON_CPU_NVLS: the switch has multicast slots for NVLink SHARP
    int nccl_version = 0; // CUDA_ON_CPU_NCCL_VERSION: what ncclGetVersion says; 0: that of the header
    Costs costs;
    size_t deepest = 0;              // operations in the fullest queue so far: near 1,000 a GPU's call would wait
    const char *registers = nullptr; // CUDA_ON_CPU_REGISTERS: a file with lines `kernel registers-per-thread`
    void (*on_failure)(const char *line) = nullptr; // told before the process ends; may end it otherwise

    CudaOnCpu() {
        if (const char *s = getenv("CUDA_ON_CPU_SEED")) seed = strtoull(s, nullptr, 10);
        if (const char *s = getenv("CUDA_ON_CPU_CHIP")) chip = atoi(strncmp(s, "sm_", 3) ? s : s + 3);
        if (const char *s = getenv("CUDA_ON_CPU_MEMORY")) memory = strtoull(s, nullptr, 10);
        if (const char *s = getenv("CUDA_ON_CPU_HELD")) held = strtoull(s, nullptr, 10);
        if (const char *s = getenv("CUDA_ON_CPU_DEVICES")) devices = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_DRIVER")) driver = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_RUNTIME")) runtime = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_TENSOR_MAPS")) tensor_maps = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_PROTECT")) protect = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_ROUGH")) rough = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_REFUSED_ALGORITHMS")) refused_algorithms = (unsigned)atoi(s);
        name = getenv("CUDA_ON_CPU_NAME");
        visible = getenv("CUDA_VISIBLE_DEVICES");
        failures = getenv("CUDA_ON_CPU_FAIL");
        registers = getenv("CUDA_ON_CPU_REGISTERS");
        nccl_lose = getenv("CUDA_ON_CPU_NCCL_LOSE");
        nccl_error = getenv("CUDA_ON_CPU_NCCL_ERROR");
        if (const char *s = getenv("CUDA_ON_CPU_NVLS")) nvls = atoi(s);
        if (const char *s = getenv("CUDA_ON_CPU_NCCL_VERSION")) nccl_version = atoi(s);
    }
};
inline CudaOnCpu cuda_on_cpu;
#include "arithmetic.h"

namespace emu { // everything of ours that device code need not name

struct Place { // in the source, for messages and to compare barriers by
    const char *file;
    int line;
    static constexpr Place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
        return Place{file, line};
    }
    bool operator==(const Place &o) const { return line == o.line && (file == o.file || !strcmp(file, o.file)); }
};

struct Limits {
    int chip;
    size_t shared, shared_of_sm;
    int threads_of_sm, blocks_of_sm;
}; // bytes a block may opt in to, bytes of an SM
inline const Limits &chip_limits();

std::string where(const Place *at); // "kernel k, file:line, block (x, y, z), thread (x, y, z): "; defined in fibers.h

/* The end: one line on stderr, exit code 3. */
__attribute__((noreturn, format(printf, 2, 3))) inline void fail(const Place *at, const char *format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::string line = "CUDA on a CPU: " + where(at) + text;
    if (cuda_on_cpu.on_failure) cuda_on_cpu.on_failure(line.c_str());
    line += '\n';
    fflush(stdout);
    fwrite(line.data(), 1, line.size(), stderr);
    fflush(stderr);
    _exit(3);
}

inline const Limits &chip_limits() {
    static const Limits known[] = {{70, 98304, 98304, 2048, 32},
                                   {75, 65536, 65536, 1024, 16},
                                   {80, 166912, 167936, 2048, 32},
                                   {86, 101376, 102400, 1536, 16},
                                   {89, 101376, 102400, 1536, 24},
                                   {90, 232448, 233472, 2048, 32}};
    for (const Limits &l : known)
        if (l.chip == cuda_on_cpu.chip) return l;
    fail(nullptr, "CUDA_ON_CPU_CHIP is %d: expected 70, 75, 80, 86, 89 or 90", cuda_on_cpu.chip);
}

inline uint64_t random_state, random_seed = ~0ull;

__forceinline__ uint64_t random_bits() { // 48 of them, by xorshift; the sequence starts again when the seed changes
    if (random_seed != cuda_on_cpu.seed) {
        random_seed = cuda_on_cpu.seed;
        random_state = (random_seed + 1) * 0x9E3779B97F4A7C15ull | 1;
    }
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state >> 16;
}

__forceinline__ uint32_t choose(uint32_t n) {
    return cuda_on_cpu.seed ? (uint32_t)((random_bits() & 0xFFFFFFFF) * n >> 32) : 0;
} // 0 .. n - 1

} // namespace emu

#include "fibers.h"
#include "races.h"
#include "streams.h"
#include "events.h"
#include "intrinsics.h"
#include "ptx.h"
#include "async.h"
#include "mbarrier.h"
#include "tma.h"
#include "bulk.h"
#include "wgmma.h"
#endif
