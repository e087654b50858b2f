#!/usr/bin/env python3
"""draw_step.py TRACE STEP OUT.svg: draws one training step of a --trace file as an SVG.

Each rank has a lane for what it computes, with the time that it waits below, and lanes for its collectives in flight.
Needs Python's standard library only; dev/course/figures draws. The figure in the README is this run:

    ./train_llama3 --ranks 4 --model tiny --data data/kjv/train.tok --seq 128 --batch 2 --steps 20 --trace t.json
    python3 dev/draw_step.py t.json 13 docs/guide/step.svg
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "course" / "figures"))
from sources import Trace  # noqa: E402
from step_timeline import StepTimeline  # noqa: E402


def main():
    if len(sys.argv) != 4:
        sys.exit("error: expected TRACE STEP OUT.svg")
    with open(sys.argv[1], encoding="utf-8") as f:
        ranks, length = Trace(json.load(f)["traceEvents"]).step(int(sys.argv[2]))
    heading = f"One training step on {len(ranks)} ranks, {length:.0f} ms"
    desc = "Each rank's lanes: computing, with the time that it waits below, all-gathers, reduce-scatters."
    t = StepTimeline(1000, length, heading, desc, heading, "Numbers are transformer blocks.")
    t.legend(["forward", "loss", "backward", "optimizer", "all_gather", "reduce_scatter"])
    for rank in sorted(ranks):
        t.rank(f"rank {rank}", ranks[rank])
    t.finish().write(sys.argv[3])


main()
