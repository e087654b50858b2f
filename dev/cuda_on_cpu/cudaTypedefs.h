/* cudaTypedefs.h: the types of the driver's functions; that of cuTensorMapEncodeTiled is in tma.h. */
#ifndef CUDA_ON_CPU_TYPEDEFS_H
#define CUDA_ON_CPU_TYPEDEFS_H
#include "cuda_runtime.h"
#endif
