"""The MFU of Llama 3 8B on 8 ranks, from the matmuls of a dry run and the step time of a simulation."""
from answers import Mistake, Number, Solved
from program import CLUSTER, command_line, estimate, peak_flops, plan

OPTIONS = "--model llama3-8b --world 8 --seq 8192 --batch 1"
NUMBERS = [Number("model FLOPs utilization (MFU)", "%", 0.02)]
T, C, F, V, L, KV = 8192, 4096, 14336, 128256, 32, 1024


def step_seconds():
    return float(f"{estimate(OPTIONS)['step_s']:.3g}")


def facts():
    return {"step_s": f"{step_seconds():.3g}", "peak": f"{peak_flops('bf16') / 1e12:.1f}"}


def solve():
    flops = plan(OPTIONS)["rank_classes"][0]["flops"]
    linear = sum(count for op, count in flops.items() if op.startswith("linear_"))
    computed = flops["attention_forward"] + flops["attention_backward"]
    attention = 12 * T * T * C * L  # all pairs of query and key, forward and backward
    embedding = 6 * T * C * V  # FLOPs, if looking up a row were a matmul

    def mfu(count, peak=peak_flops("bf16")):
        return 100 * count / step_seconds() / peak

    right = mfu(linear + attention)
    mistakes = [
        Mistake(mfu((linear + attention) / 3), "This is the forward pass alone. Which two matmuls does "
                "backward have for each one of forward?"),
        Mistake(mfu(linear), "The matmuls are right. Attention multiplies too: queries by keys, and weights by "
                "values, and at 8,192 tokens that is not small."),
        Mistake(mfu(linear + computed), "This counts half of the pairs, and the scores a second time in backward. The "
                "program computes that, but MFU as it is usually reported counts all pairs, and each score once."),
        Mistake(mfu(linear + attention / 2), "This counts half of the pairs, those that the causal mask leaves. MFU "
                "as it is usually reported counts all of them."),
        Mistake(mfu(linear + attention + embedding), "The embedding has as many parameters as the head, but it is a "
                "lookup of rows and no matmul."),
        Mistake(right * peak_flops("bf16") / peak_flops("fp32"), "This is relative to the peak in fp32. The matmuls "
                "are in bf16."),
        Mistake(right / 2, "The datasheet's larger figure counts zeros of sparse matrices. Dense matmuls reach half."),
        Mistake(right * 8, "The tokens of one rank, please: MFU is per GPU, or all FLOPs over all GPUs' peaks."),
    ]
    per_block = 2 * C * C + 2 * C * KV + 3 * C * F
    in_matmuls = L * per_block + C * V
    derivation = f"""\
Parameters in matmuls: {L} blocks of 2·C² + 2·C·KV + 3·C·F = {per_block:,}, and the head's C·V = {C * V:,}:
{in_matmuls:,}.
Each token takes 2 FLOPs per parameter forward and 4 backward: 6 · {T:,} · that = {6 * T * in_matmuls:.4g}.
Attention forward: 4·C FLOPs per pair of query and key, T² pairs, {L} blocks: {4 * C * T * T * L:.4g}.
Its backward takes twice as many, so attention has {attention:.4g} in all.
Together {linear + attention:.4g} FLOPs; over {step_seconds():.3g} s · {peak_flops('bf16'):.4g} FLOP/s: {right:.1f} %.
The weights of norms, which torchtitan counts too, change nothing in three digits. The planner's figure is lower,
{mfu(linear + computed):.1f} %, because it counts what is computed: {computed:.4g} FLOPs for attention."""
    return Solved([right], [mistakes], derivation, [command_line(f"{OPTIONS} --cluster {CLUSTER}")])
