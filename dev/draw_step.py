#!/usr/bin/env python3
"""draw_step.py TRACE STEP OUT.svg: draws one training step of a --trace file as an SVG.

Each rank has a lane for what it computes, with the time that it waits on top, and lanes for its collectives in flight.
Needs Python's standard library only. The figure in the README is this run:

    ./train_llama3 --ranks 4 --model tiny --data data/kjv/train.tok --seq 128 --batch 2 --steps 20 --trace t.json
    python3 dev/draw_step.py t.json 13 docs/guide/step.svg
"""
import json
import sys
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT, TOP = 1000, 62, 12, 44  # pixels
LANE, COLLECTIVE, GAP = 25, 13, 16          # heights: of a compute lane, of a collective's lane, between ranks
COLORS = {"forward": "#8fbf8f", "loss": "#d9c45b", "backward": "#c99bd0", "optimizer": "#b0a08a", "wait": "#ffffff",
          "all_gather": "#6fa8dc", "reduce_scatter": "#f0a35e"}
LEGEND = [("forward", "forward"), ("loss", "head and loss"), ("backward", "backward"), ("optimizer", "AdamW"),
          ("wait", "waiting"), ("all_gather", "all-gather of weights"),
          ("reduce_scatter", "reduce-scatter of gradients")]


def short(name):
    """'model.layers.3' -> '3', 'embedding' -> 'embed'"""
    return name.removeprefix("model.layers.").replace("embedding", "embed")


def events_of_step(trace, step):
    """The events of each rank within its training step, with times relative to the first rank's start, in ms."""
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    steps = {e["pid"]: e for e in events if e["cat"] == "step" and e["args"]["step"] == step}
    if not steps:
        sys.exit(f"error: the trace has no step {step}")
    zero = min(e["ts"] for e in steps.values())
    ranks = {}
    for e in events:
        whole = steps.get(e["pid"])
        if not whole or e["cat"] not in ("phase", "wait", "communication") or e["ts"] < whole["ts"] - 1:
            continue
        if e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1:
            ranks.setdefault(e["pid"], []).append({**e, "at": (e["ts"] - zero) / 1000, "ms": e["dur"] / 1000})
    length = max(e["ts"] + e["dur"] - zero for e in steps.values()) / 1000
    return ranks, length


def pack(events):
    """Gives each event the first lane that is free at its start."""
    ends = []
    for e in sorted(events, key=lambda e: e["at"]):
        lane = next((i for i, end in enumerate(ends) if end <= e["at"]), len(ends))
        ends[lane:lane + 1] = [e["at"] + e["ms"]]
        e["lane"] = lane
    return len(ends)


class Drawing:
    def __init__(self, length):
        self.scale = (WIDTH - LEFT - RIGHT) / length
        self.parts = []

    def x(self, ms):
        return LEFT + ms * self.scale

    def text(self, x, y, words, size=11, anchor="start", color="#222"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{color}">'
                          f'{escape(words)}</text>')

    def box(self, x, y, width, height, kind, label="", title=""):
        dash = ' stroke-dasharray="2 2"' if kind == "wait" else ""
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height}" '
                          f'fill="{COLORS[kind]}" stroke="#555" stroke-width="0.5"{dash}>'
                          f'<title>{escape(title)}</title></rect>')
        if label and width > 6.5 * len(label):
            self.text(x + width / 2, y + min(height / 2 + 4, 13), label, 10, "middle")

    def event(self, e, y, height, kind, label=""):
        self.box(self.x(e["at"]), y, e["ms"] * self.scale, height, kind, label, f'{e["name"]}: {e["ms"]:.1f} ms')


def draw_rank(drawing, y, rank, events):
    """Draws a rank's lanes and returns the y below them."""
    drawing.text(4, y + LANE / 2 + 4, f"rank {rank}", 12)
    for e in events:
        kind, _, unit = e["name"].partition(": ")
        if e["cat"] == "phase" and kind in COLORS:
            drawing.event(e, y, LANE, kind, short(unit) if unit else "")
    for e in events:
        if e["cat"] == "wait":
            drawing.event(e, y + LANE - 8, 7, "wait")
    y += LANE + 2
    for kind in ("all_gather", "reduce_scatter"):
        collectives = [e for e in events if e["name"].startswith(kind + ": ") and "report" not in e["name"]]
        lanes = pack(collectives)
        for e in collectives:
            drawing.event(e, y + e["lane"] * COLLECTIVE, COLLECTIVE - 2, kind, short(e["name"].partition(": ")[2]))
        y += lanes * COLLECTIVE
    return y + GAP


def main():
    if len(sys.argv) != 4:
        sys.exit("error: expected TRACE STEP OUT.svg")
    with open(sys.argv[1], encoding="utf-8") as f:
        ranks, length = events_of_step(json.load(f), int(sys.argv[2]))
    drawing = Drawing(length)
    drawing.text(LEFT, 18, f"One training step on {len(ranks)} ranks, {length:.0f} ms. Numbers are transformer blocks.",
                 14)
    x = LEFT
    for kind, words in LEGEND:
        drawing.box(x, 26, 12, 10, kind)
        drawing.text(x + 16, 35, words)
        x += 34 + 6.6 * len(words)
    y = TOP
    for rank in sorted(ranks):
        y = draw_rank(drawing, y + 4, rank, ranks[rank])
    tick = next(t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 10000) if length / t <= 14)
    for i in range(int(length / tick) + 1):
        drawing.text(drawing.x(i * tick), y + 4, f"{i * tick}" + (" ms" if i == 0 else ""), 10, "middle", "#666")
    with open(sys.argv[3], "w", encoding="utf-8") as f:
        f.write(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 12}" font-family="sans-serif">\n'
                f'<rect width="{WIDTH}" height="{y + 12}" fill="#ffffff"/>\n' + "\n".join(drawing.parts) + "\n</svg>\n")


main()
