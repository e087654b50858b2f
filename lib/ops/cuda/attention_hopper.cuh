/* attention_hopper.cuh: whether the attention kernels for GPUs of compute capability 9.0 (H100, H200) can run, and the
 * tensor maps by which they load and store.
 *
 * The kernels are in attention_hopper_forward.cuh and attention_hopper_backward.cuh.
 */
#ifndef CUDA_ATTENTION_HOPPER_CUH
#define CUDA_ATTENTION_HOPPER_CUH
#include "attention_common.cuh" // defines: AttentionShape
#include "hopper.cuh"           // defines: HOPPER_CODE, PANEL
#include <cudaTypedefs.h>       // defines: PFN_cuTensorMapEncodeTiled_v12000
#if !defined(CUDA_ON_CPU) && CUDART_VERSION < 12050
#error "The CUDA build needs CUDA toolkit 12.5 or newer"
#endif

#ifdef PRECISION_BF16
/* Asks the driver for its function that makes tensor maps; NULL if it has none. */
static PFN_cuTensorMapEncodeTiled_v12000 hopper_map_encoder(void) {
    void *function = NULL;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess) cudaGetLastError(); // else the next launch would report it
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? (PFN_cuTensorMapEncodeTiled_v12000)function
                                                                        : NULL;
}

/* Tells the host whether this program has the kernels' code for its GPU: built for compute_90 instead of compute_90a
 * they are empty. */
static __global__ void __launch_bounds__(1) hopper_code_kernel(int *has_code) { *has_code = HOPPER_CODE; }

/* Describes x (B, T, heads, HD), whose tokens are `stride` elements apart, to TMA, in boxes of `rows` tokens. */
static CUtensorMap hopper_map(const OpStream *on, const bf16 *x, const AttentionShape *s, int T, int heads,
                              int64_t stride, int rows) {
    CUtensorMap map = ZERO;
    const cuuint64_t sizes[4] = {(cuuint64_t)s->HD, (cuuint64_t)heads, (cuuint64_t)T, (cuuint64_t)s->B};
    const cuuint64_t bytes = sizeof *x, strides[3] = {s->HD * bytes, stride * bytes, T * stride * bytes};
    const cuuint32_t box[4] = {PANEL, 1, (cuuint32_t)rows, 1}, every[4] = {1, 1, 1, 1};
    if (!x) return map; // no tensor of this call
    CUresult result = ((PFN_cuTensorMapEncodeTiled_v12000)on->encode_tensor_map)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)x, sizes, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        run_failure("attention: the driver refused to describe a tensor of %d sequences, %d tokens %" PRId64
                    " elements apart, %d heads of %d to TMA, with error %d",
                    s->B, T, stride, heads, s->HD, (int)result);
    return map;
}
#endif

/* Chooses the kernels for compute capability 9.0 where they can run. Returns what keeps them from running on such a
 * GPU, in words; otherwise NULL. `scratch`: 4 bytes of the GPU's memory. */
static const char *attention_open(OpStream *on, int *scratch) {
#ifdef PRECISION_BF16
    int gpu = 0, major = 0, minor = 0, has_code = 0;
    const char *what = "asking for the GPU's compute capability";
    on->encode_tensor_map = NULL;
    on->hopper_attention = 0;
    cuda_check(cudaGetDevice(&gpu), what);
    cuda_check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu), what);
    cuda_check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu), what);
    if (major != 9 || minor != 0) return NULL;
    KERNEL(on, hopper_code_kernel, 1, 1, 0, scratch);
    cuda_check(cudaMemcpyAsync(&has_code, scratch, sizeof has_code, cudaMemcpyDeviceToHost, on->stream), what);
    cuda_check(cudaStreamSynchronize(on->stream), what);
    if (!has_code) return "this program was not compiled for sm_90a: build with make CUDA=1";
    on->encode_tensor_map = (void *)hopper_map_encoder();
    if (!on->encode_tensor_map)
        return "the NVIDIA driver has no tensor maps (cuTensorMapEncodeTiled): install one for CUDA 12 or newer";
    on->hopper_attention = 1;
#else
    (void)on;
    (void)scratch;
#endif
    return NULL;
}

#endif
