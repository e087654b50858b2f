/* rope.cu: the steps of RoPE on a GPU.
 *
 * Two elements are read, rotated and written back. The cosine and sine of the angle come from a table that all heads of
 * a token share, so they are read from the caches. What is left is to move the heads with wide loads and stores.
 *
 *   nvcc -O3 -std=c++20 -ftz=true -arch=native -DUSE_CUDA -Xcompiler -fopenmp rope.cu -o rope
 * with page.cuh page.h rope.h lib/device/kernel.h lib/ops/cuda/rope.cuh lib/ops/cuda/vectors.cuh */
#include "../../lib/ops/cuda/rope.cuh"
#include "rope.h"

static const double TURN = 6.283185307179586;

static __device__ __forceinline__ void turn(float *first, float *second, float cosine, float sine) {
    float a = *first, b = *second;
    *first = a * cosine - b * sine;
    *second = b * cosine + a * sine;
}

// Thread i: one pair of one head of one token, numbered (n, head, pair).
template <bool TABLE>
static __global__ void __launch_bounds__(256)
    rope_kernel1(floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int64_t N, int T, int heads,
                 int HD, float direction) {
    int64_t i = thread_number(), half = HD / 2, n = i / (heads * half), head = i / half % heads, pair = i % half;
    if (n >= N) return;
    floatX *first = x + n * stride + head * HD + pair, *second = first + half;
    float a = to_float(*first), b = to_float(*second), cosine, sine;
    if (TABLE) {
        cosine = cos_sin[(int64_t)positions[n % T] * HD + pair];
        sine = cos_sin[(int64_t)positions[n % T] * HD + half + pair];
    } else { // in double, and without whole turns: at position 8,000 a float's angle has lost four of its seven digits
        double turns = (double)positions[n % T] * pow(THETA, -2.0 * (double)pair / (double)HD) / TURN;
        float angle = (float)((turns - rint(turns)) * TURN);
        cosine = __cosf(angle);
        sine = __sinf(angle);
    }
    turn(&a, &b, cosine, sine * direction);
    *first = from_float(a);
    *second = from_float(b);
}
template <bool TABLE> static void rope_pairs(Case *c) {
    int64_t N = c->size[0], heads = c->size[2], HD = c->size[3];
    KERNEL(c->on, rope_kernel1<TABLE>, blocks_for(N * heads * (HD / 2), 256), 256, 0, X("x"), c->size[4], F("cos_sin"),
           I("positions"), N, (int)c->size[1], (int)heads, (int)HD, (float)c->size[5]);
}

// As kernel 1 with the table, and W pairs per thread: two loads and two stores of 16 bytes.
template <int W>
static __global__ void __launch_bounds__(256)
    rope_kernel2(floatX *x, int64_t stride, const float *cos_sin, const int32_t *positions, int64_t N, int T, int heads,
                 int HD, float direction) {
    int half = HD / 2, pieces = half / W;
    int64_t i = thread_number(), n = i / (heads * pieces), head = i / pieces % heads, pair = i % pieces * W;
    if (n >= N) return;
    floatX *first = x + n * stride + head * HD + pair;
    const float *table = cos_sin + (int64_t)positions[n % T] * HD + pair;
    float a[W], b[W], cosine[W], sine[W];
    load(a, first);
    load(b, first + half);
    load(cosine, table);
    load(sine, table + half);
    for (int j = 0; j < W; j++) turn(&a[j], &b[j], cosine[j], sine[j] * direction);
    store(first, a);
    store(first + half, b);
}
static void rope_vectors(Case *c) {
    int64_t N = c->size[0], heads = c->size[2], HD = c->size[3], stride = c->size[4];
    KERNEL_BY_WIDTH(c->on, HD / 2 % WIDE == 0 && stride % WIDE == 0, WIDE, rope_kernel2,
                    blocks_for(N * heads * (HD / 2 / W), 256), 256, 0, X("x"), stride, F("cos_sin"), I("positions"), N,
                    (int)c->size[1], (int)heads, (int)HD, (float)c->size[5]);
}

static const Version rope_versions[PAGE_VERSIONS] = {
    {"1 pow, cos and sin",
     "The formula, a pair per thread: a power in double, then the hardware's "
     "approximate sine and cosine; hundreds of instructions to move 8 bytes "
     "(bf16).",
     rope_pairs<false>},
    {"2 a table",
     "Cosines and sines of all positions, computed once: 8 bytes more per pair, "
     "but from the caches, since all heads of a token read the same ones.",
     rope_pairs<true>},
    {"3 vectors",
     "Loads of 16 bytes: an eighth of the instructions (bf16), and the divisions "
     "that compute a thread's head and element are done once for eight pairs.",
     rope_vectors},
    {"in use",
     "The op of lib/ops/cuda: x is loaded before the position and the angles, which "
     "take two loads in a row.",
     rope_in_use}};

PAGE({&rope, rope_versions})
