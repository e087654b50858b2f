/* cuda.h: what programs use of the driver API: tensor maps (tma.h) and their types. */
#ifndef CUDA_ON_CPU_CUDA_H
#define CUDA_ON_CPU_CUDA_H
#include "cuda_runtime.h"
#endif
