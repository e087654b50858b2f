/* mfu.h: model FLOPs utilization (MFU) as it is usually reported: the model's FLOPs over time and a datasheet's peak.
 *
 * FLOPs per token are those of torchtitan (get_dense_model_nparams_and_flops in torchtitan/models/utils.py): 6 for each
 * parameter of a matmul or norm, 2 forward and 4 backward, and 12 L NH HD T for attention, which counts all T keys,
 * also those that the causal mask hides. Nothing that is recomputed counts. Next to this the program reports
 * matmul_share, which counts what is computed and compares it with a plain matmul that it measured (matmul_rate).
 */
#ifndef MFU_H
#define MFU_H
#include "../../lib/ops/ops.h" // defines: linear_forward, scratch, RATE_ROWS, RATE_COLS, RATE_COUNTS
#include "../../llama3.h"      // defines: Llama3Config, TensorTable

/* Dense bf16 FLOP/s with fp32 sums, by the name that CUDA gives a GPU. A slice of a GPU (MIG) has a name of its own. */
static const struct {
    const char *name;
    double bf16;
} datasheet_rates[] = {
    // H100, H200 and GH200 datasheets give rates with sparsity, twice the dense ones: 1,979 (SXM), 1,671 (NVL) and
    // 1,513 (PCIe). NVIDIA's whitepaper on the H100 architecture has 989.4 without.
    {"NVIDIA H200", 989.4e12},
    {"NVIDIA H200 NVL", 835.5e12},
    {"NVIDIA H100 80GB HBM3", 989.4e12},
    {"NVIDIA H100 PCIe", 756.5e12},
    {"NVIDIA H100 NVL", 835.5e12},
    {"NVIDIA GH200 480GB", 989.4e12},
    // A100 datasheet: 312 without sparsity
    {"NVIDIA A100-SXM4-40GB", 312e12},
    {"NVIDIA A100-SXM4-80GB", 312e12},
    {"NVIDIA A100-PCIE-40GB", 312e12},
    {"NVIDIA A100 80GB PCIe", 312e12},
    // HGX B200 datasheet: 36,000 for 8 GPUs with sparsity
    {"NVIDIA B200", 2250e12},
    // L40S datasheet: 362.05 without sparsity; Ada and GA102 whitepapers, appendix A: bf16 with fp32 accumulation
    {"NVIDIA L40S", 362.05e12},
    {"NVIDIA GeForce RTX 4090", 165.2e12},
    {"NVIDIA GeForce RTX 3090", 71e12},
};

/* The bf16 rate of a GPU's datasheet, in FLOP/s; 0: this program does not know it. */
static double datasheet_rate(const char *name) {
    for (size_t i = 0; i < sizeof datasheet_rates / sizeof *datasheet_rates; i++)
        if (!strcmp(datasheet_rates[i].name, name)) return datasheet_rates[i].bf16;
    return 0;
}

/* FLOPs per token of training the whole model, `table`, on sequences of T tokens; 0: only adapters are trained. The
 * embedding is a lookup and no matmul, so its parameters count only if the head shares them. */
static double mfu_flops_per_token(const TensorTable *table, const Llama3Config *c, int T) {
    if (table->num_trained < table->num_parameters) return 0; // adapters: most weights have no gradient
    int64_t computing = table->num_parameters - (c->tied ? 0 : (int64_t)c->V * c->C);
    return 6.0 * (double)computing + 12.0 * c->L * c->NH * c->HD * T;
}

/* FLOP/s of a plain matmul y (N, C) = x (N, C) · w (C, C), the fastest of several, in the compute dtype; 0 where such a
 * rate means nothing (CUDA emulated on a CPU). The measurement leaves no trace in the device's counts and timeline. */
static double matmul_rate(Device *dev) {
    const int N = RATE_ROWS, C = RATE_COLS, repetitions = 4;
    OpStat ops[OP_COUNT];
    double clock = dev->rec.clock, seconds = INFINITY;
    int64_t events = dev->rec.num_events;
    size_t mark = arena_mark(dev, MEM_WORKSPACE);
    device_phase(dev, "measuring the matmul rate", NULL);
    memcpy(ops, dev->rec.ops, sizeof ops);
    floatX *x = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * N * C);
    floatX *w = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * C * C);
    floatX *y = (floatX *)scratch(dev, "matmul rate", sizeof(floatX) * N * C);
    int count = dev->dry_run ? 0 : (int)max_i64(N, C) * C;
    floatX *numbers = new_array(floatX, count);
    for (int i = 0; i < count; i++) numbers[i] = from_float((float)(i % 17) - 8);
    device_write(dev, x, numbers, sizeof(floatX) * N * C);
    device_write(dev, w, numbers, sizeof(floatX) * C * C);
    free(numbers);
    for (int i = 0; i < repetitions; i++) {
        device_synchronize(dev);
        double start = seconds_now();
        linear_forward(dev, y, x, w, N, C, C);
        device_synchronize(dev);
        seconds = fmin(seconds, seconds_now() - start);
    }
    memcpy(dev->rec.ops, ops, sizeof ops);
    device_phase(dev, NULL, NULL);
    dev->rec.clock = clock;
    timeline_truncate(dev, events);
    arena_release(dev, MEM_WORKSPACE, mark);
    return RATE_COUNTS ? 2.0 * N * C * C / seconds : 0;
}

#endif
