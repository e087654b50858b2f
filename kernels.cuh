/* kernels.cuh: every op of kernels.h on an NVIDIA GPU.
 */
#ifndef KERNELS_CUH
#define KERNELS_CUH

enum { LOGIT_ROWS = 2048, LOGITS = 1 << 28 }; // at a time: at most so many rows, and 1 GiB of them
#ifdef CUDA_ON_CPU
enum { RATE_ROWS = 64, RATE_COLS = 64 };
#else
enum { RATE_ROWS = 8192, RATE_COLS = 4096 }; // of the product that measures what this device can do
#endif

#endif
