/* pages.cu: all pages for GPUs in one program, so that lib/ops/cuda is compiled only once.
 *
 *   pages NAME|all [options of a page: page.h]
 */
#include "../../lib/ops/cuda/start.cuh" // all of lib/ops/cuda, outside of the namespaces
#include "../../lib/ops/cuda/adamw.cuh"
#include "../../lib/ops/cuda/elementwise.cuh"
#include "../../lib/ops/cuda/embedding.cuh"
#include "../../lib/ops/cuda/muon.cuh"
#include "../../lib/ops/cuda/rmsnorm.cuh"
#include "../../lib/ops/cuda/rope.cuh"
#include "../../lib/ops/cuda/squared_norm.cuh"
#include "../../lib/ops/cuda/swiglu.cuh"
#include "../../lib/ops/cuda/tree_sum.cuh"
#include "page.h"
#include "page_matmul.cuh"
#undef PAGE_THAT_OPENS
#define PAGE_THAT_OPENS(open, ...) /* not main */                                                                      \
    static const PageOp ops[] = {__VA_ARGS__, {NULL, NULL}};                                                           \
    static void (*const opens)(OpStream * on) = open;

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
#ifdef PRECISION_BF16 // within attention.cu's namespace, which has the definition that all four include
namespace mma {
#include "attention_mma.cu"
}
namespace hopper_forward {
#include "attention_hopper_forward.cu"
}
namespace hopper_backward {
#include "attention_hopper_backward.cu"
}
#endif
} // namespace attention_page
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

static void (*chosen_open[18])(OpStream *on); // of the chosen pages
static void pages_open(OpStream *on) {
    for (auto open : chosen_open)
        if (open) open(on);
}

/* Adds an op to those that run. Where several pages are about one op, it has the first page's sizes and the versions of
 * all of them, in order. The version in use comes last; it is the first page's. */
static void choose(PageOp *chosen, int *count, const PageOp *page) {
    static Version joined[32][PAGE_VERSIONS];
    int i = 0, n = 0;
    while (i < *count && strcmp(chosen[i].op->name, page->op->name)) i++;
    if (i == *count) {
        memcpy(joined[i], page->versions, sizeof joined[i]);
        chosen[(*count)++] = {page->op, joined[i]};
        return;
    }
    while (joined[i][n].run) n++;
    const Version in_use = joined[i][--n];
    for (const Version *v = page->versions; v->run; v++)
        if (strncmp(v->name, "in use", 6)) joined[i][n++] = *v;
    joined[i][n] = in_use;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        const PageOp *ops;
        void (*open)(OpStream *on);
    } pages[] = {{"embedding", embedding_page::ops, embedding_page::opens},
                 {"rmsnorm", rmsnorm_page::ops, rmsnorm_page::opens},
                 {"linear", linear_page::ops, linear_page::opens},
                 {"rope", rope_page::ops, rope_page::opens},
                 {"attention", attention_page::ops, attention_page::opens},
#ifdef PRECISION_BF16
                 {"attention", attention_page::mma::ops, attention_page::mma::opens},
                 {"attention", attention_page::hopper_forward::ops, attention_page::hopper_forward::opens},
                 {"attention", attention_page::hopper_backward::ops, attention_page::hopper_backward::opens},
#endif
                 {"swiglu", swiglu_page::ops, swiglu_page::opens},
                 {"cross_entropy", cross_entropy_page::ops, cross_entropy_page::opens},
                 {"tree_sum", tree_sum_page::ops, tree_sum_page::opens},
                 {"squared_norm", squared_norm_page::ops, squared_norm_page::opens},
                 {"adamw", adamw_page::ops, adamw_page::opens},
                 {"muon", muon_page::ops, muon_page::opens},
                 {"cast", cast_page::ops, cast_page::opens},
                 {"dequantize", dequantize_page::ops, dequantize_page::opens},
                 {"scale", scale_page::ops, scale_page::opens},
                 {"adapter_merge", adapter_merge_page::ops, adapter_merge_page::opens}};
    PageOp chosen[32];
    int count = 0;
    for (const auto &page : pages) {
        if (argc < 2 || (strcmp(argv[1], "all") && strcmp(argv[1], page.name))) continue;
        chosen_open[&page - pages] = page.open;
        for (const PageOp *op = page.ops; op->op; op++) choose(chosen, &count, op);
    }
    if (!count)
        user_error("%s: expected the name of a page (%s, …) or all", argc > 1 ? argv[1] : "nothing given",
                   pages[0].name);
    return page_main(argc - 1, argv + 1, pages_open, chosen, count);
}
