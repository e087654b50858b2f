/* start.cuh: start and end of the CUDA implementation of the ops. */
#ifndef CUDA_START_CUH
#define CUDA_START_CUH
#include "attention.cuh"     // defines: cuda_attention_has
#include "cross_entropy.cuh" // defines: cross_entropy_kernel
#include "matmul.cuh"        // defines: CudaMatmulCache

// ---------------------------------------------------------------------------
// start and end

/* A GPU, and kernels for heads of HD elements. */
static void cuda_require_head_size(int HD) {
    device_count();
    if (!cuda_attention_has(HD))
        user_error("attention heads of %d elements have no CUDA kernel, 1 to 256 are expected: use ./train_llama3, "
                   "which runs on the processor",
                   HD);
    if (cuda_attention_has(HD) == 1 && FLOATX == DTYPE_BF16)
        fprintf(stderr,
                "attention: tensor cores serve heads of 64 and 128 elements; those of %d go through a plain kernel, "
                "many times slower\n",
                HD);
}

/* Once per rank, on the rank's own thread. `say`: whether this rank tells of what is slower than it should be. */
static void cuda_ops_open(Device *dev, int say) {
    void *workspace = arena_alloc(dev, MEM_WORKSPACE, "cuBLASLt", CUDA_WORKSPACE_BYTES);
    if (dev->dry_run) return;
    CudaMatmulCache *cache = dev->cuda_matmuls = (CudaMatmulCache *)checked_malloc(sizeof *cache);
    cache->say = say;
    cublas_check(cublasLtCreate(&cache->handle), "its start");
    cache->workspace = workspace;
    const void *with_shared[2] = {(const void *)cross_entropy_kernel<FLAT>, (const void *)cross_entropy_kernel<1>};
    for (int i = 0; i < 2; i++)
        cuda_check(
            cudaFuncSetAttribute(with_shared[i], cudaFuncAttributeMaxDynamicSharedMemorySize, loss_shared_bytes(dev)),
            "asking for shared memory");
}
static void cuda_ops_close(Device *dev) {
    CudaMatmulCache *cache = dev->cuda_matmuls;
    if (!cache) return;
    device_synchronize(dev); // products may still use the workspace
    for (CudaMatmulEntry *m = cache->entries, *next; m; m = next) {
        next = m->next;
        for (int i = 0; i < 3; i++) cublasLtMatrixLayoutDestroy(m->layout[i]);
        cublasLtMatmulDescDestroy(m->how);
        free(m);
    }
    cublasLtDestroy(cache->handle);
    free(cache);
    dev->cuda_matmuls = NULL;
}

#endif
