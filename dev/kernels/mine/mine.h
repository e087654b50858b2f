/* mine.h: a kernel of your own, checked against the definition of a page of this folder's parent and timed next to the
 * op in use. my_rmsnorm.cu shows how: include this file and OP.h, write the op, name it in MY_KERNEL.
 *
 * The function my_OP has the parameters of cpu_OP or cuda_OP in lib/ops. `make mine` builds a program that checks and
 * times it, and a shared library in which it replaces that function, for PyTorch.
 */
#ifndef MINE_H
#define MINE_H
#ifdef USE_CUDA // the ops of all pages but linear and attention, which need a library or a choice of kernels
#include "../../../lib/ops/cuda/adamw.cuh"
#include "../../../lib/ops/cuda/cross_entropy.cuh"
#include "../../../lib/ops/cuda/elementwise.cuh"
#include "../../../lib/ops/cuda/embedding.cuh"
#include "../../../lib/ops/cuda/muon.cuh"
#include "../../../lib/ops/cuda/rmsnorm.cuh"
#include "../../../lib/ops/cuda/rope.cuh"
#include "../../../lib/ops/cuda/squared_norm.cuh"
#include "../../../lib/ops/cuda/swiglu.cuh"
#include "../../../lib/ops/cuda/tree_sum.cuh"
#else
#include "../../../lib/ops/cpu/cross_entropy.h"
#include "../../../lib/ops/cpu/flat_tensors.h"
#include "../../../lib/ops/cpu/layers.h"
#include "../../../lib/ops/cpu/rmsnorm.h"
#endif
#include "../page.h"

#ifdef MINE_LIBRARY // a shared library has no main
#define MY_KERNEL(op, run)
#else
#define MY_KERNEL(op, run)                                                                                             \
    int main(int argc, char **argv) {                                                                                  \
        const Version versions[PAGE_VERSIONS] = {{"mine", "Your kernel.", run},                                        \
                                                 {"in use", "That of lib/ops.", (op).in_use}};                         \
        const PageOp page = {&(op), versions};                                                                         \
        return page_main(argc, argv, NULL, &page, 1);                                                                  \
    }
#endif

#endif
