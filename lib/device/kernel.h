/* kernel.h: what the implementations of ops (lib/ops/cpu, lib/ops/cuda) build on, and nothing else: dtypes, helpers,
 * and what an op runs on. Each compiles without the rest of the program: errors are reported by base.h and
 * device_cuda.h, or on a page by dev/kernels/page.h. floatX is the dtype of weights and activations, chosen at build
 * time by PRECISION; arithmetic is fp32. */
#ifndef KERNEL_H
#define KERNEL_H
#if defined(__linux__) && !defined(ONLY_POSIX)
#define LINUX 1
#define _GNU_SOURCE 1 // as C++ compilers define it
#elif defined(__linux__)
#define _XOPEN_SOURCE 700
#define _DEFAULT_SOURCE // calls that Linux shares with the BSDs and macOS: flock, madvise, MAP_ANONYMOUS
#endif
#include <assert.h> // static_assert
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef USE_CUDA // NVIDIA's toolkit, or dev/cuda_on_cpu, which has headers of the same names
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#define BOTH __host__ __device__
enum { CUDA_BUILD = 1 };
#else
#define BOTH // marks functions that run on the CPU and on the GPU
enum { CUDA_BUILD = 0 };
#endif
#define ZERO {} // an initializer that sets every member to zero

// ---------------------------------------------------------------------------
// dtypes

typedef struct {
    uint16_t bits; // the upper half of an fp32
} bf16;

typedef enum { DTYPE_F32, DTYPE_BF16, DTYPE_BYTE } Dtype;

static inline size_t dtype_size(Dtype d) {
    static const size_t sizes[] = {4, 2, 1};
    return sizes[d];
}

enum { INT8_BLOCK = 64 }; // int8 weights that share one fp32 scale

static inline BOTH float bf16_to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Rounds to nearest even; NaN stays NaN. */
static inline BOTH bf16 float_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40u;
    int is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    bf16 r = {(uint16_t)(is_nan ? quiet_nan : rounded)};
    return r;
}

#ifdef PRECISION_BF16
typedef bf16 floatX;
#define FLOATX DTYPE_BF16
#define PRECISION_NAME "bf16"
static inline BOTH float to_float(floatX x) { return bf16_to_float(x); }
static inline BOTH floatX from_float(float x) { return float_to_bf16(x); }
#else
typedef float floatX;
#define FLOATX DTYPE_F32
#define PRECISION_NAME "fp32"
static inline BOTH float to_float(floatX x) { return x; }
static inline BOTH floatX from_float(float x) { return x; }
#endif

// ---------------------------------------------------------------------------
// small helpers

static inline BOTH int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }
static inline BOTH int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
static inline BOTH int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline BOTH int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Random bits from a counter: the output function of splitmix64. */
static inline BOTH uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* The row of token `id` in a slice of the vocabulary, V tokens from `first` on; -1: another rank has it. */
static inline BOTH int slice_row(int32_t id, int first, int V) {
    return id >= first && id - first < V ? id - first : -1;
}

/* Ends the run because of what the user can fix, or of a failure of the run itself. */
__attribute__((noreturn, format(printf, 1, 2))) static inline void user_error(const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) static inline void run_failure(const char *format, ...);

/* Memory set to zero, or the run ends. */
static inline void *checked_malloc(size_t bytes) {
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p) run_failure("out of memory: could not allocate %zu bytes on the host", bytes);
    return p;
}

/* An array of `count` elements, all zero. */
#define new_array(type, count) ((type *)checked_malloc(sizeof(type) * (size_t)(count)))

// ---------------------------------------------------------------------------
// what an op runs on

/* Threads of a CPU, or a stream of a GPU. */
typedef struct {
    int threads;                 // OpenMP threads
    int deterministic;           // equal bits in each run, also where that costs time
    struct MatmulCache *matmuls; // oneDNN's primitives by shape, or cuBLASLt's choices: matmul.h, matmul.cuh
    int left_to_nccl;            // multiprocessors that persistent kernels leave; 0 on a CPU
#ifdef USE_CUDA
    cudaStream_t stream;
    int multiprocessors;
    int shared_limit;        // bytes of shared memory that a block may use
    int hopper_attention;    // 1: attention by lib/ops/cuda/attention_hopper_*.cuh; tests and benchmarks change it
    void *encode_tensor_map; // the driver's cuTensorMapEncodeTiled, for those kernels; NULL: it has none
#endif
} OpStream;

#ifdef USE_CUDA
#define IMPLEMENTATION(op) cuda_##op
#else
#define IMPLEMENTATION(op) cpu_##op
#endif

#endif
