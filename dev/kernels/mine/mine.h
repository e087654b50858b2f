/* mine.h: a kernel of your own, checked against the definition of a page of this folder's parent and timed next to the
 * op in use. my_rmsnorm.cu shows how: include this file, include a page, write the op, name it in MY_KERNEL.
 *
 * The function my_OP has the parameters of OP in lib/ops/ops.h. It calls op_begin, which counts FLOPs and bytes and
 * returns 0 in a dry run, and op_end. `make mine` then builds a program that checks and times it, and a shared library
 * in which it replaces OP, for PyTorch.
 */
#ifndef MINE_H
#define MINE_H
#include "../page.h"
#undef PAGE
#define PAGE(...) static const Op *const ops_of_page[] = {__VA_ARGS__}; // not main

/* main of the program: the page's op of this name in two versions, yours and the page's last, the op in use. */
static inline int mine_main(int argc, char **argv, const Op *const *ops, int count, const char *name,
                            void (*run)(Case *c)) {
    for (int i = 0; i < count; i++) {
        if (strcmp(ops[i]->name, name)) continue;
        int last = 0;
        while (ops[i]->versions[last + 1].run) last++;
        Version versions[] = {{"mine", "Your kernel.", run}, ops[i]->versions[last], END_OF_VERSIONS};
        Op op = *ops[i];
        op.versions = versions;
        const Op *const only[] = {&op};
        return page_main(argc, argv, only, 1);
    }
    user_error("MY_KERNEL names the op %s, which the included page does not have; its first op is %s: name one of "
               "those in its PAGE(…)",
               name, ops[0]->name);
}
#ifdef MINE_LIBRARY // a shared library has no main
#define MY_KERNEL(name, run)
#else
#define MY_KERNEL(name, run)                                                                                           \
    int main(int argc, char **argv) {                                                                                  \
        return mine_main(argc, argv, ops_of_page, (int)(sizeof ops_of_page / sizeof *ops_of_page), name, run);         \
    }
#endif

#endif
