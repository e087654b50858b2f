/* pages.cu: all pages with CUDA steps in one program, so that lib/ops/cuda is compiled only once.
 *
 *   pages NAME|all [options of a page: page.h]
 */
#ifndef USE_CUDA
#error "pages.cu is for CUDA: in C each page is a program of its own"
#endif
#include "page.h"
#undef PAGE
#define PAGE(...) static const Op *const ops[] = {__VA_ARGS__, NULL}; // not main

namespace embedding_page {
#include "embedding.cu"
}
namespace rmsnorm_page {
#include "rmsnorm.cu"
}
namespace linear_page {
#include "linear.cu"
}
namespace rope_page {
#include "rope.cu"
}
namespace attention_page {
#include "attention.cu"
}
namespace swiglu_page {
#include "swiglu.cu"
}
namespace cross_entropy_page {
#include "cross_entropy.cu"
}
namespace tree_sum_page {
#include "tree_sum.cu"
}
namespace squared_norm_page {
#include "squared_norm.cu"
}
namespace adamw_page {
#include "adamw.cu"
}
namespace muon_page {
#include "muon.cu"
}
namespace cast_page {
#include "cast.cu"
}
namespace dequantize_page {
#include "dequantize.cu"
}
namespace scale_page {
#include "scale.cu"
}
namespace adapter_merge_page {
#include "adapter_merge.cu"
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        const Op *const *ops;
    } pages[] = {{"embedding", embedding_page::ops},
                 {"rmsnorm", rmsnorm_page::ops},
                 {"linear", linear_page::ops},
                 {"rope", rope_page::ops},
                 {"attention", attention_page::ops},
                 {"swiglu", swiglu_page::ops},
                 {"cross_entropy", cross_entropy_page::ops},
                 {"tree_sum", tree_sum_page::ops},
                 {"squared_norm", squared_norm_page::ops},
                 {"adamw", adamw_page::ops},
                 {"muon", muon_page::ops},
                 {"cast", cast_page::ops},
                 {"dequantize", dequantize_page::ops},
                 {"scale", scale_page::ops},
                 {"adapter_merge", adapter_merge_page::ops}};
    const Op *chosen[32];
    int count = 0;
    for (const auto &page : pages)
        for (const Op *const *op = page.ops;
             argc > 1 && *op && (!strcmp(argv[1], "all") || !strcmp(argv[1], page.name)); op++)
            chosen[count++] = *op;
    if (!count)
        user_error("%s: expected the name of a page (%s, …) or all", argc > 1 ? argv[1] : "nothing given",
                   pages[0].name);
    return page_main(argc - 1, argv + 1, chosen, count);
}
