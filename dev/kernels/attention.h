/* attention.h: attention's definition, and its op in use, for attention.c and attention.cu. */
#ifndef PAGE_ATTENTION_H
#define PAGE_ATTENTION_H
#include "attention_backward.h" // defines: backward_case, backward_prepare, backward_definition
#include "attention_forward.h"  // defines: forward_case, forward_definition

static void forward_in_use(Case *c) {
    AttentionShape s = shape_of(c);
    void *workspace = page_scratch(c, IMPLEMENTATION(attention_scratch)(c->on, &s, 0));
    IMPLEMENTATION(attention_forward)(c->on, X("out"), F("lse"), X("q"), X("k"), X("v"), &s, workspace);
}

static void compute_out_and_lse(Case *c) { forward_in_use(c); }

static void backward_in_use(Case *c) {
    AttentionShape s = shape_of(c);
    void *workspace = page_scratch(c, IMPLEMENTATION(attention_scratch)(c->on, &s, 1));
    IMPLEMENTATION(attention_backward)
    (c->on, X("dq"), X("dk"), X("dv"), X("dout"), X("out"), F("lse"), X("q"), X("k"), X("v"), &s, workspace);
}

static const Op forward = {"attention_forward", forward_case, NULL, forward_definition, forward_in_use,
                           ATTENTION_SIZES(50)};
static const Op backward = {"attention_backward", backward_case, backward_prepare, backward_definition, backward_in_use,
                            ATTENTION_SIZES(50)};

#endif
