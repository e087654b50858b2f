"""The MFU of Llama 3 8B on 8 ranks, from the FLOPs of a dry run and the step time of a simulation."""
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
    attention = flops["attention_forward"] + flops["attention_backward"]
    embedding = 6 * T * C * V  # FLOPs, if looking up a row were a matmul

    def mfu(count, peak=peak_flops("bf16")):
        return 100 * count / step_seconds() / peak

    right = mfu(linear + attention)
    mistakes = [
        Mistake(mfu(linear / 3 + flops["attention_forward"]), "This is the forward pass alone. Which two matmuls does "
                "backward have for each one of forward?"),
        Mistake(mfu(linear), "The matmuls are right. Attention multiplies too: queries by keys, and weights by "
                "values, and at 8,192 tokens that is not small."),
        Mistake(mfu(linear + 2 * attention), "Under the causal mask a query sees half of the keys on average. The "
                "program counts only pairs that are computed."),
        Mistake(mfu(linear + 3 * flops["attention_forward"]), "Attention's backward computes the scores again, so it "
                "has five matmuls where forward has two."),
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
Attention forward: 4·C FLOPs per pair of query and key that the mask leaves, T(T + 1)/2 pairs, {L} blocks: \
{4 * C * T * (T + 1) / 2 * L:.4g}.
Its backward takes 2.5 times as many, so attention has {14 * C * T * (T + 1) / 2 * L:.4g} in all.
Together {linear + attention:.4g} FLOPs; over {step_seconds():.3g} s · {peak_flops('bf16'):.4g} FLOP/s: {right:.1f} %.
The program adds norms, SwiGLU and AdamW, which changes nothing in three digits."""
    return Solved([right], [mistakes], derivation, [command_line(f"{OPTIONS} --cluster {CLUSTER}")])
