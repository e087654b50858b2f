/* kernels.cuh: every op of kernels.h on an NVIDIA GPU.
 */
#ifndef KERNELS_CUH
#define KERNELS_CUH

enum { LOGIT_ROWS = 2048, LOGITS = 1 << 28 }; // at a time: at most so many rows, and 1 GiB of them

#endif
