/* test_mfu.h: model FLOPs utilization as torchtitan counts it, against figures worked out by hand. Part of
 * test_llama3.cu. */
#include "../../run/checks/mfu.h"

/* FLOPs per token of `c` on sequences of 8,192 tokens. */
static double counted_flops(const Llama3Config *c) {
    TensorTable table;
    table_open(&table, c, 0, &WHOLE_MODEL);
    double flops = mfu_flops_per_token(&table, c, 8192);
    table_close(&table);
    return flops;
}

static void test_mfu(void) {
    Llama3Config small = *preset_find("llama3.2-1b"), half = *preset_find("llama3-8b"), adapted = small;
    half.L = 16;
    adapted.base = BASE_FROZEN;
    adapted.lora_rank = 16;
    adapted.lora_targets = 1;
    // Llama-3.2-1B has 1,235,814,400 parameters. The embedding is among them, because it is the head.
    double of_small = counted_flops(&small), by_hand = 6 * 1235814400.0 + 12.0 * 16 * 32 * 64 * 8192;
    check(of_small == by_hand, "Llama-3.2-1B: FLOPs per token with a tied head", "%.0f, expected %.0f", of_small,
          by_hand);
    // 16 blocks of 218,112,000 parameters, the final norm, and a head of its own with 128,256 x 4,096
    double of_half = counted_flops(&half), expected = 6 * (16 * 218112000.0 + 4096 + 128256.0 * 4096);
    expected += 12.0 * 16 * 32 * 128 * 8192;
    check(of_half == expected, "16 blocks of Llama-3-8B: FLOPs per token without the embedding", "%.0f, expected %.0f",
          of_half, expected);
    check(counted_flops(&adapted) == 0, "adapters have no MFU", "%.0f FLOPs per token", counted_flops(&adapted));
    // measured on one H200: 32,768 tokens in 541 ms and in 1,520 ms
    double peak = datasheet_rate("NVIDIA H200"), first = of_small * 32768 / 0.541 / peak;
    double second = of_half * 32768 / 1.520 / peak;
    check(fabs(first - 0.651) < 0.0005 && fabs(second - 0.665) < 0.0005, "MFU of two measured steps on an H200",
          "%.1f %% and %.1f %%, expected 65.1 %% and 66.5 %%", 100 * first, 100 * second);
    check(datasheet_rate("NVIDIA H200 NVL") < peak && datasheet_rate("NVIDIA H100 PCIe") < peak,
          "cards of other power have other rates", "H200 NVL %.1f, H100 PCIe %.1f TFLOP/s",
          datasheet_rate("NVIDIA H200 NVL") / 1e12, datasheet_rate("NVIDIA H100 PCIe") / 1e12);
    double unknown = datasheet_rate("NVIDIA H200 MIG 1g.18gb") + datasheet_rate("NVIDIA H2000") + datasheet_rate("");
    check(unknown == 0, "a slice of a GPU, an unknown GPU and a CPU have no datasheet rate", "%g FLOP/s", unknown);
}
