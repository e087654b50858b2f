/* page.cuh: memory and times on an NVIDIA GPU, for page.h, and what the kernels of pages share.
 *
 * Rates are measured in the same run. The copy rate is that of a large copy within the device, bytes read and written.
 * The matmul rate, which only pages of ops with matmuls measure, is that of the fastest of cuBLASLt's matmuls with
 * shapes of Llama's layers, on random data. Before each timed call a kernel reads more bytes than the L2 cache holds,
 * so that operands come from memory; the call is enqueued while that kernel runs: no launch waits for the host. On the
 * emulator (dev/cuda_on_cpu) nothing is timed.
 */
#ifndef PAGE_CUH
#define PAGE_CUH
#include "../../lib/ops/cuda/vectors.cuh" // defines: load<W>, store<W>, warp_sum, KERNEL

enum { RATE_CALLS = 9, FLUSH_BYTES = 256 << 20 }; // more than twice any L2
static const size_t COPY_BYTES = (size_t)2 << 30;
#define FOR_CPU(...)
#define FOR_GPU(...) __VA_ARGS__ // sizes that take a reasonable time on a GPU
static const double FLOPS_UNIT = 1e12;
static const char *const COLUMNS[3] = {"TFLOP/s", "of measured", "measured rates"};
static struct {
    double copy, matmul; // bytes/s, read + written; FLOP/s
    uint4 *flush;        // (FLUSH_BYTES) zeros
    cudaEvent_t start, end;
} page_gpu;

#ifndef BASE_H // a library of one's own kernels (mine/) has the program's
static inline void cuda_check(cudaError_t error, const char *what) {
    if (error != cudaSuccess) run_failure("CUDA: %s: %s", what, cudaGetErrorString(error));
}
#endif

static void *page_alloc(size_t bytes) {
    void *data = NULL;
    cuda_check(cudaMalloc(&data, bytes ? bytes : 1), "allocating memory for a page");
    cuda_check(cudaMemset(data, 0, bytes), "clearing it");
    cuda_check(cudaDeviceSynchronize(), "clearing memory"); // on->stream does not wait for the default stream
    return data;
}
static void page_free(void *data) { cuda_check(cudaFree(data), "freeing memory"); }
static void page_copy(void *to, const void *from, size_t bytes) {
    cuda_check(cudaDeviceSynchronize(), "waiting for the GPU");
    cuda_check(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copying a tensor");
    cuda_check(cudaDeviceSynchronize(), "copying a tensor");
}
static void page_wait(const OpStream *on) { cuda_check(cudaStreamSynchronize(on->stream), "waiting for a version"); }

static void page_zero(Case *c, void *data, size_t bytes) {
    cuda_check(cudaMemsetAsync(data, 0, bytes, c->on->stream), "clearing memory");
}
static void page_move(Case *c, void *to, const void *from, size_t bytes) {
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, c->on->stream), "moving memory");
}

static __device__ __forceinline__ int64_t thread_number(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
static unsigned blocks_for(int64_t threads, int block) { return (unsigned)blocks_of(threads, block); }

static __global__ void flush_kernel(uint4 *p, int64_t count) { // reads zeros, which the compiler cannot know
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int64_t i = thread_number(); i < count; i += (int64_t)gridDim.x * blockDim.x) {
        sum.x |= p[i].x | p[i].y;
        sum.z |= p[i].z | p[i].w;
    }
    if (sum.x | sum.z) p[0] = sum;
}

/* The GPU's clock around a call of `run`, its operands in memory: seconds. */
template <class Run> static double page_timed(OpStream *on, Run run) {
    float ms = 0;
    KERNEL(on, flush_kernel, 1024, 256, 0, page_gpu.flush, FLUSH_BYTES / 16);
    cuda_check(cudaEventRecord(page_gpu.start, on->stream), "recording an event");
    run();
    cuda_check(cudaEventRecord(page_gpu.end, on->stream), "recording an event");
    cuda_check(cudaEventSynchronize(page_gpu.end), "waiting for a call");
    cuda_check(cudaEventElapsedTime(&ms, page_gpu.start, page_gpu.end), "asking for a time");
    return 1e-3 * ms;
}
template <class Run> static double page_timed_median(OpStream *on, Run run) {
    Times t = ZERO;
    for (run(); t.n < RATE_CALLS; t.n++) t.at[t.n] = page_timed(on, run);
    return times_median(&t);
}

static void page_open(OpStream *on, PageOptions *o) {
    cudaDeviceProp gpu;
    cuda_check(cudaGetDeviceProperties(&gpu, 0), "asking what GPU this is");
    cuda_check(cudaStreamCreateWithFlags(&on->stream, cudaStreamNonBlocking), "making a stream");
    on->multiprocessors = gpu.multiProcessorCount;
    cuda_check(cudaDeviceGetAttribute(&on->shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "asking a limit");
#ifdef CUDA_ON_CPU
    if (!o->check) fprintf(stderr, "not timed: kernels run on a processor; the checks alone\n");
    o->check = 1;
#endif
    if (o->check) return;
    cuda_check(cudaEventCreateWithFlags(&page_gpu.start, cudaEventDefault), "making an event");
    cuda_check(cudaEventCreateWithFlags(&page_gpu.end, cudaEventDefault), "making an event");
    page_gpu.flush = (uint4 *)page_alloc(FLUSH_BYTES);
    void *from = page_alloc(COPY_BYTES), *to = page_alloc(COPY_BYTES);
    double seconds = page_timed_median(on, [&] {
        cuda_check(cudaMemcpyAsync(to, from, COPY_BYTES, cudaMemcpyDeviceToDevice, on->stream), "copying");
    });
    page_gpu.copy = 2 * (double)COPY_BYTES / seconds;
    page_free(from);
    page_free(to);
    printf("\n%s, %d rounds, medians; measured: %.0f GB/s copied (read and written).\n", gpu.name, o->rounds,
           page_gpu.copy / 1e9);
}

/* The roofline on a GPU: the case's bytes at the copy rate, or its matmul FLOPs at the matmul rate, if slower. */
static Roofline case_times(Case *c, const Version *versions, const double *estimate, int rounds, double *seconds) {
    Times *t = new_array(Times, PAGE_VERSIONS);
    for (int r = 0; r < rounds; r++)
        for (int v = 0; v < PAGE_VERSIONS && versions[v].run; v++) {
            if (estimate[v] <= 0 || (t[v].n && t[v].total > 0.6)) continue; // 0.6 s of a slow version are enough
            case_restore(c, 0);
            double took = page_timed(c->on, [&] { versions[v].run(c); });
            if (r > 0 || rounds == 1) t[v].at[t[v].n++] = took; // the first round warms up
            t[v].total += took;
        }
    for (int v = 0; v < PAGE_VERSIONS; v++) seconds[v] = times_median(&t[v]);
    Roofline roof = {case_bytes(c) / page_gpu.copy, page_gpu.matmul ? c->matmul_flops / page_gpu.matmul : 0};
    free(t);
    return roof;
}

#endif
