/* page.cuh: the GPU half of page.h: rates that times are compared with, timing by events, helpers of kernels.
 *
 * Rates are measured in the same run. The copy rate is that of a large copy within the device, bytes read and written.
 * The matmul rate is that of the fastest of cuBLASLt's matmuls with shapes of Llama's layers, on random data. Before
 * each timed call a kernel reads more bytes than the L2 cache holds, so that operands come from memory; the call is
 * enqueued while that kernel runs, so that no launch waits for the host. On the emulator (dev/cuda_on_cpu) nothing is
 * timed.
 */
#ifndef PAGE_CUH
#define PAGE_CUH

enum { RATE_TOKENS = 8192, RATE_CALLS = 9, FLUSH_BYTES = 256 << 20 }; // more than twice any L2
static const double FLOPS_UNIT = 1e12;
static const char *const COLUMNS[3] = {"TFLOP/s", "of measured", "measured rates"};

/* Bytes of an arena, which is cleared when it is made. The largest tensors are those copied for the copy rate, and P
 * and dS of naive attention. */
#ifdef CUDA_ON_CPU
static size_t page_memory(MemCategory category) { return category == MEM_COMM ? 0 : (size_t)12 << 20; }
#else
static size_t page_memory(MemCategory category) {
    if (category == MEM_COMM) return FLUSH_BYTES;
    return (size_t)(category == MEM_WORKSPACE ? 17 : 5) << 30;
}
#endif

// ---------------------------------------------------------------------------
// what kernels share; lib/ops/cuda/vectors.cuh has load<W>, store<W>, warp_sum and the choice of W

static __device__ __forceinline__ int64_t thread_number(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
static unsigned blocks_for(int64_t threads, int block) {
    return (unsigned)blocks_of(threads, block);
} // grid.x goes to 2^31 - 1

// ---------------------------------------------------------------------------
// rates and times

static const size_t COPY_BYTES = (size_t)2 << 30;
static struct {
    double copy, matmul;
    uint4 *flush;
    cudaEvent_t start, end;
} page_gpu; // bytes/s, read + written; FLOP/s

static __global__ void random_kernel(floatX *x, int64_t count) { // uniform in (-1, 1)
    int64_t i = thread_number();
    if (i < count) x[i] = from_float((float)(mix64((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
}
static __global__ void flush_kernel(
    uint4 *p, int64_t count) { // reads all of it; it is zero, which the compiler cannot know, so nothing is written
    uint4 sum = make_uint4(0, 0, 0, 0);
    for (int64_t i = thread_number(); i < count; i += (int64_t)gridDim.x * blockDim.x) {
        sum.x |= p[i].x;
        sum.y |= p[i].y;
        sum.z |= p[i].z;
        sum.w |= p[i].w;
    }
    if (sum.x | sum.y | sum.z | sum.w) p[0] = sum;
}

/* Seconds of one call, its operands in memory. */
static double timed_call(Case *c, void (*run)(Case *c)) {
    float ms = 0;
    if (c->restore) case_restore(c);
    KERNEL(c->dev, flush_kernel, 1024, 256, 0, page_gpu.flush, FLUSH_BYTES / 16);
    cuda_check(cudaEventRecord(page_gpu.start, c->dev->stream), "recording an event");
    run(c);
    cuda_check(cudaEventRecord(page_gpu.end, c->dev->stream), "recording an event");
    cuda_check(cudaEventSynchronize(page_gpu.end), "waiting for a call");
    cuda_check(cudaEventElapsedTime(&ms, page_gpu.start, page_gpu.end), "asking for a time");
    return 1e-3 * ms;
}
static double timed_median(Case *c, void (*run)(Case *c)) {
    Times t;
    memset(&t, 0, sizeof t);
    for (run(c); t.n < RATE_CALLS; t.n++) t.at[t.n] = timed_call(c, run);
    return times_median(&t);
}

static void rate_copy(Case *c) { device_copy(c->dev, c->tensors[0].data, c->tensors[1].data, COPY_BYTES); }
static void rate_matmul(Case *c) {
    linear_forward(c->dev, (floatX *)c->tensors[0].data, (floatX *)c->tensors[1].data, (floatX *)c->tensors[2].data,
                   RATE_TOKENS, (int)c->size[0], (int)c->size[1]);
}

static void rates_open(Device *dev, const PageOptions *o) {
    static const int shapes[][2] = {
        {2048, 16384}, {8192, 2048}, {4096, 6144}, {4096, 28672}, {14336, 4096}}; // IC, OC of 1B and 8B layers
    static Case rate;                                                             // not a case of any page
    cudaDeviceProp gpu;
    cuda_check(cudaGetDeviceProperties(&gpu, 0), "asking what GPU this is");
    cuda_check(cudaEventCreateWithFlags(&page_gpu.start, cudaEventDefault), "making an event");
    cuda_check(cudaEventCreateWithFlags(&page_gpu.end, cudaEventDefault), "making an event");
    page_gpu.flush =
        (uint4 *)arena_alloc(dev, MEM_COMM, "what is read to flush the cache", FLUSH_BYTES); // zero, and stays so
    rate.dev = dev;
    for (int i = 0; i < 2; i++)
        rate.tensors[i].data = arena_alloc(dev, MEM_ACTIVATIONS, "a tensor of a page", COPY_BYTES);
    page_gpu.copy = 2 * (double)COPY_BYTES / timed_median(&rate, rate_copy);
    arena_release(dev, MEM_ACTIVATIONS, 0);
    for (int i = 0; i < (int)(sizeof shapes / sizeof *shapes); i++) {
        int64_t IC = shapes[i][0], OC = shapes[i][1], counts[3] = {RATE_TOKENS * OC, RATE_TOKENS * IC, OC * IC};
        rate.size[0] = IC;
        rate.size[1] = OC;
        for (int k = 0; k < 3; k++) {
            rate.tensors[k].data =
                arena_alloc(dev, MEM_ACTIVATIONS, "a tensor of a page", (size_t)counts[k] * sizeof(floatX));
            KERNEL(dev, random_kernel, blocks_for(counts[k], 256), 256, 0, (floatX *)rate.tensors[k].data, counts[k]);
        }
        page_gpu.matmul = fmax(page_gpu.matmul, 2 * (double)(RATE_TOKENS * IC * OC) / timed_median(&rate, rate_matmul));
        arena_release(dev, MEM_ACTIVATIONS, 0);
    }
    printf(page_checks.markdown ? "\n%s, %d rounds, medians; measured: %.0f GB/s copied (read and written), %.1f "
                                  "TFLOP/s in the fastest matmul of %s.\n"
                                : "%s, %d rounds, medians; measured: %.0f GB/s copied (read and written), %.1f TFLOP/s "
                                  "in the fastest matmul of %s\n",
           gpu.name, o->rounds, page_gpu.copy / 1e9, page_gpu.matmul / 1e12, PRECISION_NAME);
}

/* The roofline on a GPU: the case's bytes at the copy rate, or its matmul FLOPs at the matmul rate, if slower. */
static Roofline case_times(Case *c, const Op *op, const double *estimate, int rounds, double *seconds) {
    Times *t = (Times *)checked_malloc(sizeof(Times) * (size_t)PAGE_VERSIONS);
    for (int r = 0; r < rounds; r++)
        for (int v = 0; v < PAGE_VERSIONS && op->versions[v].run; v++) {
            if (estimate[v] <= 0 || t[v].total > 0.6) continue; // 0.6 s of a slow version are enough
            double took = timed_call(c, op->versions[v].run);
            if (r > 0 || rounds == 1) t[v].at[t[v].n++] = took; // the first round warms up
            t[v].total += took;
        }
    for (int v = 0; v < PAGE_VERSIONS; v++) seconds[v] = times_median(&t[v]);
    Roofline roof;
    roof.memory = case_bytes(c) / page_gpu.copy;
    roof.arithmetic = c->matmul_flops / page_gpu.matmul;
    roof.seconds = fmax(roof.memory, roof.arithmetic);
    roof.unrest = 0;
    free(t);
    return roof;
}
#endif
