"""The longest sequence that fits, found by dry runs."""
from functools import lru_cache

from answers import Mistake, Number, Solved
from program import command_line, plan

OPTIONS = "--model llama3.2-1b --world 1 --batch 1"
ROOM, STEP, SHORT, LONG = 80 * 10**9, 1024, 4096, 8192
NUMBERS = [Number("tokens", "tokens", 0.02)]


def memory(tokens):
    return plan(f"{OPTIONS} --seq {tokens}")["rank_classes"][0]


def facts():
    return {"room": f"{ROOM:,}", "short": f"{SHORT:,}"}


@lru_cache(maxsize=None)
def longest():
    fits, too_long = 0, 131072 // STEP
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if memory(middle * STEP)["peak"] <= ROOM:
            fits = middle
        else:
            too_long = middle
    return fits * STEP


def solve():
    at_short, at_long = memory(SHORT), memory(LONG)
    activations = at_short["memory"]["activations"]
    per_token = (at_long["peak"] - at_short["peak"]) / (LONG - SHORT)
    constant = at_short["peak"] - per_token * SHORT
    right = longest()
    # An attention that forms (T, T) scores in bf16, for the 32 heads of all 16 blocks: a T² + b T = what is left.
    quadratic = 2 * 32 * 16
    scores = (-per_token + (per_token**2 + 4 * quadratic * (ROOM - constant)) ** 0.5) / (2 * quadratic)
    mistakes = [
        Mistake(ROOM / per_token, "Activations are not alone in memory: what does not grow with the sequence?"),
        Mistake(ROOM / at_short["peak"] * SHORT, "Not all memory grows with the sequence. Weights, gradients and "
                "moments stay as they are: subtract them first."),
        Mistake((ROOM - constant) / (per_token * 2), "These are activations in fp32. Most are bf16."),
        Mistake(scores, "Attention never forms the (T, T) scores; it goes through them in tiles. Memory is linear in "
                "the number of tokens."),
        Mistake((ROOM - constant) / (activations / SHORT / 16), "That is one block's activations. Backward needs those "
                "of all 16 blocks."),
        Mistake((ROOM - constant) / (2 * 2 * 2048 * 16), "That is the residual stream alone. Nothing is recomputed, so "
                "all inputs of matmuls, norms and SwiGLU are kept."),
    ]
    derivation = f"""\
Two dry runs: {at_short['peak']:,} bytes at {SHORT:,} tokens, {at_long['peak']:,} at {LONG:,}. The difference is
{per_token:,.0f} bytes per token, and {constant / 1e9:.2f} GB do not depend on the sequence (18 bytes per parameter and
buffers). ({ROOM / 1e9:.0f} − {constant / 1e9:.2f}) GB / {per_token:,.0f} = {(ROOM - constant) / per_token:,.0f} tokens.
By hand, a block keeps per token, in bf16: the residual stream twice (2·2,048), two norms' outputs (2·2,048), queries,
keys, values (3,072), attention's output (2,048), gate and up (16,384), SwiGLU's output (8,192): 37,888 elements.
The largest multiple of {STEP:,} that fits, tried by dry runs, is {right:,}: {memory(right)['peak']:,} bytes."""
    return Solved([right], [mistakes], derivation, [command_line(f"{OPTIONS} --seq {right}"),
                                                    command_line(f"{OPTIONS} --seq {right + STEP}")])
