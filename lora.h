/* lora.h: linear layers with LoRA adapters (Hu et al. 2021), and their frozen weights in int8.
 *
 * A linear layer computes y = x W^T from x (N, IC) and W (OC, IC). An adapter leaves W frozen and trains two small
 * matrices, A (r, IC) and B (OC, r): y = x W^T + alpha / r · (x A^T) B^T. Matrices that are fused into one matmul (Q, K
 * and V; gate and up) have an adapter each. Without adapters each function is the matmul alone. In the comments on
 * parameters, "=" after a shape means that the call overwrites the tensor.
 */
#ifndef LORA_H
#define LORA_H
#include "lib/ops/int8.h" // defines: QuantizedLayout, dequantize_elements
#include "lib/ops/ops.h"  // defines: linear_forward, linear_forward_add, linear_backward_weight, …
#include "llama3.h"       // defines: Llama3Config, adapter_scale, TensorTable, Unit

typedef struct {
    WeightKind matrix;   // which it is added to
    int column, outputs; // it adds to columns [column, column + outputs) of the layer's output (N, OC)
    const floatX *a;     // (r, IC)
    const floatX *b;     // (outputs, r)
    float *d_a, *d_b;    // gradients of a and b; NULL in forward
} Adapter;

enum { MAX_FUSED = 3 }; // matrices in one matmul

/* The shapes are those of linear_layer; block_weights (train_llama3.cu) sets the addresses, block after block. */
typedef struct {
    WeightKind matrix; // W is this one, or begins with it
    int IC, OC;        // widths of the layer's input and output
    const floatX *w;   // (OC, IC)
    float *d_w;        // (OC, IC) gradient of w; NULL if w is frozen, and in forward
    int accumulates;   // backward adds to d_w and the adapters' gradients; 0: it overwrites them
    int num_adapters;
    Adapter adapters[MAX_FUSED];
} Linear;

typedef struct {
    Device *dev;
    int r;            // --lora-rank, called r by the paper and by PEFT; 0: there are no adapters
    float scale;      // alpha / r
    floatX *hidden;   // (N, r) scale · x A^T
    floatX *d_hidden; // (LORA_TARGETS, N, r) gradient of each adapter's x A^T; NULL when not training
} Lora;

/* A matrix and those that are fused with it (Q, K, V; gate, up) as one layer with their adapters, without addresses. */
static Linear linear_layer(const Llama3Config *c, WeightKind first) {
    Linear layer = ZERO;
    int kind = first;
    layer.matrix = first;
    layer.IC = (int)dim_size(c, llama3_tensors[first].cols);
    do {
        int outputs = (int)dim_size(c, llama3_tensors[kind].rows);
        Adapter adapter = {(WeightKind)kind, layer.OC, outputs, NULL, NULL, NULL, NULL};
        if (is_adapted(c, adapter.matrix)) layer.adapters[layer.num_adapters++] = adapter;
        layer.OC += outputs;
        kind++;
    } while (llama3_tensors[kind].fused);
    return layer;
}

/* Allocates for micro-batches of up to N tokens. */
static void lora_open(Lora *lora, Device *dev, const Llama3Config *c, int64_t N, int training) {
    memset(lora, 0, sizeof *lora);
    lora->dev = dev;
    lora->r = c->lora_rank;
    if (!lora->r) return;
    lora->scale = adapter_scale(c);
    lora->hidden = arena_array(floatX, dev, MEM_ACTIVATIONS, "LoRA hidden", N * lora->r);
    if (!training) return;
    lora->d_hidden = arena_array(floatX, dev, MEM_ACTIVATIONS, "d LoRA hidden", LORA_TARGETS * N * lora->r);
}

/* lora->hidden = scale · x A^T. */
static void lora_hidden_forward(const Lora *lora, const Adapter *adapter, const floatX *x, int N, int IC) {
    linear_forward(lora->dev, lora->hidden, x, adapter->a, N, IC, lora->r);
    scale(lora->dev, lora->hidden, lora->scale, (int64_t)N * lora->r);
}

static void lora_linear_forward(const Lora *lora, floatX *y /* (N,OC) = */, const floatX *x /* (N,IC) */,
                                const Linear *layer, int N) {
    linear_forward(lora->dev, y, x, layer->w, N, layer->IC, layer->OC);
    for (int i = 0; i < layer->num_adapters; i++) {
        const Adapter *adapter = &layer->adapters[i];
        lora_hidden_forward(lora, adapter, x, N, layer->IC);
        linear_forward_add(lora->dev, y + adapter->column, layer->OC, lora->hidden, adapter->b, N, lora->r,
                           adapter->outputs);
    }
}

/* The buffer (N, r) for the gradient of an adapter's x A^T. */
static floatX *adapter_d_hidden(const Lora *lora, const Adapter *adapter, int N) {
    return lora->d_hidden + (int64_t)lora_target(adapter->matrix) * N * lora->r;
}

/* dx = the gradient of the layer's input; NULL: not needed. Also computes d_hidden for lora_linear_backward_weight. */
static void lora_linear_backward_input(const Lora *lora, floatX *dx /* (N,IC) = */, const floatX *dy /* (N,OC) */,
                                       const Linear *layer, int N) {
    Device *dev = lora->dev;
    if (dx) linear_backward_input(dev, dx, dy, layer->OC, layer->w, N, layer->IC, layer->OC);
    for (int i = 0; i < layer->num_adapters; i++) {
        const Adapter *adapter = &layer->adapters[i];
        const floatX *dy_columns = dy + adapter->column; // (N, outputs), rows OC apart
        floatX *d_hidden = adapter_d_hidden(lora, adapter, N);
        linear_backward_input(dev, d_hidden, dy_columns, layer->OC, adapter->b, N, lora->r, adapter->outputs);
        scale(dev, d_hidden, lora->scale, (int64_t)N * lora->r);
        if (dx) linear_backward_input_add(dev, dx, d_hidden, adapter->a, N, layer->IC, lora->r);
    }
}

/* The gradients of the layer's weights. lora->hidden is recomputed: to keep it would take N · r elements for every
 * adapter. */
static void lora_linear_backward_weight(const Lora *lora, const floatX *dy /* (N,OC) */, const floatX *x /* (N,IC) */,
                                        const Linear *layer, int N) {
    Device *dev = lora->dev;
    int r = lora->r, accumulates = layer->accumulates;
    if (layer->d_w) linear_backward_weight(dev, layer->d_w, dy, layer->OC, x, N, layer->IC, layer->OC, accumulates);
    for (int i = 0; i < layer->num_adapters; i++) {
        const Adapter *adapter = &layer->adapters[i];
        const floatX *dy_columns = dy + adapter->column;
        lora_hidden_forward(lora, adapter, x, N, layer->IC);
        linear_backward_weight(dev, adapter->d_b, dy_columns, layer->OC, lora->hidden, N, r, adapter->outputs,
                               accumulates);
        linear_backward_weight(dev, adapter->d_a, adapter_d_hidden(lora, adapter, N), r, x, N, layer->IC, r,
                               accumulates);
    }
}

/* out (padded) = the weights of a gathered int8 unit in the compute dtype. */
static void dequantize_base(Device *dev, floatX *out, const void *gathered, const QuantizedLayout *layout,
                            const TensorTable *table, const Unit *unit) {
    for (int i = unit->first_tensor; i < unit->end_tensor; i++) {
        const Tensor *t = &table->tensors[i];
        dequantize_elements(dev, out + t->offset, gathered, layout, t->is_quantized, t->stored_at, t->rows * t->cols);
    }
}

#endif
