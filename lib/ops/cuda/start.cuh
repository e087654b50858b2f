/* start.cuh: start and end of the CUDA implementation of the ops, and which attention heads it can compute. */
#ifndef CUDA_START_CUH
#define CUDA_START_CUH
#include "attention.cuh"     // includes what defines cuda_attention_support and attention_open
#include "cross_entropy.cuh" // defines: cross_entropy_open
#include "matmul.cuh"        // defines: matmul_open, matmul_close, CUDA_WORKSPACE_BYTES

/* Ends the program with an error if no kernel computes heads of HD elements. */
static void cuda_require_head_size(int HD) {
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

static size_t cuda_ops_workspace(void) { return CUDA_WORKSPACE_BYTES; }

static void cuda_ops_open(OpStream *on, void *workspace, int say) {
    matmul_open(on, workspace, say);
    cross_entropy_open(on);
    const char *missing = attention_open(on, (int *)workspace);
    if (missing && say)
        fprintf(stderr,
                "note: attention uses the kernels for compute capability 8.0 instead of the faster ones for 9.0, "
                "because %s\n",
                missing);
}

static void cuda_ops_close(OpStream *on) { matmul_close(on); }

#endif
