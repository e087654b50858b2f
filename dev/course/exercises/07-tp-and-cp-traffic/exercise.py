"""What rank 0 receives over tp and over cp, from the traffic of a dry run."""
from answers import Mistake, Number, Solved
from program import command_line, plan, traffic

OPTIONS = "--model llama3-8b --world 8 --tp 2 --cp 4 --seq 8192 --batch 1 --accum 2"
TP, CP, K, L, C, T, KV = 2, 4, 2, 32, 4096, 8192, 1024
NUMBERS = [Number("over tp", "bytes", 0.005), Number("over cp", "bytes")]


def solve():
    of_plan = plan(OPTIONS)
    tp = traffic(of_plan, "tp", "all_gather") + traffic(of_plan, "tp", "reduce_scatter")
    gathers, scatters = traffic(of_plan, "cp", "all_gather"), traffic(of_plan, "cp", "reduce_scatter")
    cp = gathers + scatters
    piece = T // CP // TP * C * 2  # bytes of (tokens / tp, C) in bf16
    one = K * (TP - 1) * piece     # one collective of each micro-batch
    of_tp = [
        Mistake(one * (8 * L + 4), "The inputs of the two pairs of matmuls are kept as this rank's tokens only. What "
                "do the gradients of the weights need of them in backward?"),
        Mistake(one * 8 * L, "Two things are missing: backward gathers the inputs once more, and embedding and head "
                "communicate, too."),
        Mistake(one * 10 * L, "Embedding and head are split over the vocabulary, so they communicate, too."),
        Mistake(one * (4 * L + 2), "That is the forward pass alone."),
        Mistake(tp * CP, "A rank has only its part of the sequence: context parallelism divides the tokens first."),
        Mistake(tp * TP, "Twice too much: does a rank receive pieces of (tokens / tp, C), or of all tokens? Are "
                "activations in bf16? Is an all-reduce counted as two collectives, and each of the two again?"),
        Mistake(tp / K, "A step has two micro-batches."),
    ]
    of_cp = [
        Mistake(cp * 4, "Four times too much: with grouped-query attention there are 8 heads of keys and values, not "
                "32, and each piece has the tokens of one rank, not the whole sequence."),
        Mistake(cp * TP, "A tensor-parallel rank gathers the keys and values of its own heads only."),
        Mistake(gathers, "Two of three collectives. Backward gathers keys and values again, and it also sums the "
                "gradients of keys and values, for their owners."),
        Mistake(cp // 2, "Half of it: there are keys and values, and a step has two micro-batches."),
        Mistake(cp * CP / (CP - 1), "A rank does not receive its own piece: of 4 pieces it receives 3."),
    ]
    derivation = f"""\
A rank has {T // CP:,} tokens of the sequence; between matmuls it has {T // CP // TP:,}, so a piece for tp is
{T // CP // TP:,} · {C:,} · 2 = {piece:,} bytes. Per block: forward gathers 2 inputs and reduce-scatters 2 outputs;
backward gathers 2 gradients and the 2 inputs again, and reduce-scatters 2 gradients: 10. Embedding and head: 2 each.
{K} micro-batches · (10 · {L} + 4) · {TP - 1} · {piece:,} = {K * (10 * L + 4) * piece:,}.
The program's {tp:,} also has 12 bytes per token for the loss and the gradients of the norms: less than 0.1 %.
cp: keys and values of {T // CP:,} tokens, {KV // TP} elements of each: {T // CP * 2 * KV // TP * 2:,} bytes. Per block
and micro-batch: gathered in forward, gathered again in backward, gradients reduce-scattered: 3.
{K} · {L} · 3 · {CP - 1} · {T // CP * 2 * KV // TP * 2:,} = {cp:,}."""
    return Solved([tp, cp], [of_tp, of_cp], derivation, [command_line(OPTIONS)])
