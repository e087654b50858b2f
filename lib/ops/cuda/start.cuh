/* start.cuh: start and end of the CUDA implementation of the ops, and which attention heads it can compute. */
#ifndef CUDA_START_CUH
#define CUDA_START_CUH
#include "attention.cuh"     // defines: cuda_attention_support, attention_open
#include "cross_entropy.cuh" // defines: cross_entropy_kernel, loss_shared_bytes
#include "matmul.cuh"        // defines: CudaMatmulCache, CUDA_WORKSPACE_BYTES

/* Ends the program with an error if there is no GPU, or if no kernel computes heads of HD elements. */
static void cuda_require_head_size(int HD) {
    device_count(); // ends the program with an error if there is no GPU
    AttentionSupport support = cuda_attention_support(HD);
    if (support == ATTENTION_NONE)
        user_error("attention heads of %d elements have no CUDA kernel, 1 to 256 are expected: use ./train_llama3, "
                   "which runs on the processor",
                   HD);
    if (support == ATTENTION_PLAIN && FLOATX == DTYPE_BF16)
        fprintf(stderr,
                "note: attention on tensor cores has heads of 64 or 128 elements; heads of %d use a plain kernel, many "
                "times slower\n",
                HD);
}

static void cuda_ops_open(Device *dev, int say) {
    void *workspace = arena_alloc(dev, MEM_WORKSPACE, "cuBLASLt", CUDA_WORKSPACE_BYTES);
    if (dev->dry_run) return;
    CudaMatmulCache *cache = (CudaMatmulCache *)checked_malloc(sizeof *cache);
    dev->cuda_matmuls = cache;
    cache->say = say;
    cublas_check(cublasLtCreate(&cache->handle), "its start");
    const char *missing = attention_open(dev, (int *)workspace);
    if (missing && say)
        fprintf(stderr,
                "note: attention uses the kernels for compute capability 8.0 instead of the faster ones for 9.0, "
                "because %s\n",
                missing);
    cache->workspace = workspace;
    const void *kernels[4] = {
        (const void *)cross_entropy_kernel<FLAT, float>, (const void *)cross_entropy_kernel<1, float>,
        (const void *)cross_entropy_kernel<WIDE, floatX>, (const void *)cross_entropy_kernel<1, floatX>};
    for (int i = 0; i < 4; i++) // more than 48 KB of shared memory must be asked for
        cuda_check(
            cudaFuncSetAttribute(kernels[i], cudaFuncAttributeMaxDynamicSharedMemorySize, loss_shared_bytes(dev)),
            "asking for shared memory");
}

static void cuda_ops_close(Device *dev) {
    CudaMatmulCache *cache = dev->cuda_matmuls;
    if (!cache) return;
    device_synchronize(dev); // matmuls may still use the workspace
    for (CudaMatmulEntry *m = cache->entries, *next; m; m = next) {
        next = m->next;
        matmul_forget(m);
        free(m);
    }
    cublasLtDestroy(cache->handle);
    free(cache);
    dev->cuda_matmuls = NULL;
}

#endif
