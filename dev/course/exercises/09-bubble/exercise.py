"""The bubble of two schedules, simulated with the program's own schedule_steps and schedule_simulate."""
from pathlib import Path

from answers import Mistake, Number, Solved
from program import run_c

P, M, V = 8, 32, 4
NUMBERS = [Number("1f1b", "%", 0.01), Number("interleaved", "%", 0.01)]


def simulated(virtual_stages):
    """Idle time over computing time, in percent, and both."""
    end, busy = run_c(Path(__file__).parent / "schedule.c", P, virtual_stages, M)
    return 100 * (end - busy) / busy, end, busy


def solve():
    (plain, plain_end, plain_busy), (interleaved, end, busy) = simulated(1), simulated(V)
    of_plain = [
        Mistake(100 * (plain_end - plain_busy) / plain_end, "That is the share of the whole step. The question asks "
                "for idle time relative to computing time."),
        Mistake(100 * P / M, "The last stage begins after how many forwards of other stages?"),
        Mistake(2 * plain, "A rank waits while the pipeline fills and while it drains, but each time for only one "
                "kind: forwards, then backwards. Divide by what a micro-batch takes in all."),
        Mistake(100 * (P - 1) / (3 * M), "Filling takes p − 1 forwards and draining takes p − 1 backwards; together "
                "that is p − 1 whole micro-batches."),
        Mistake(interleaved, "That is the interleaved schedule."),
    ]
    of_interleaved = [
        Mistake(plain, "That is 1f1b. A stage that is V times shorter fills the pipeline V times as fast."),
        Mistake(plain * V, "More virtual stages make the bubble shorter: each is a fraction of the rank's blocks."),
        Mistake(100 * (end - busy) / end, "That is the share of the whole step. The question asks for idle time "
                "relative to computing time."),
        Mistake(100 * (P * V - 1) / (M * V), "There are p · V stages, but they are on p ranks: the first micro-batch "
                "reaches the last rank after p − 1 of them."),
        Mistake(100 * P / M / V, "The last stage begins after how many forwards of other stages?"),
    ]
    derivation = f"""\
1f1b: rank 0 waits until the first micro-batch comes back: p − 1 forwards of other ranks and p − 1 backwards, in all
p − 1 micro-batches' time. It computes m micro-batches. (p − 1)/m = {P - 1}/{M} = {plain:.2f} %.
Interleaved: a virtual stage has 1/V of the rank's blocks, so filling and draining take (p − 1)/V micro-batches' time:
(p − 1)/(V·m) = {P - 1}/{V * M} = {interleaved:.2f} %. The price is V times as many messages.
Simulated, a forward of a virtual stage taking 1 and a backward 2: 1f1b ends at {plain_end}, computes {plain_busy};
interleaved ends at {end}, computes {busy}."""
    return Solved([plain, interleaved], [of_plain, of_interleaved], derivation,
                  [f"build/exercises/09-bubble/schedule {P} {V} {M}"])
