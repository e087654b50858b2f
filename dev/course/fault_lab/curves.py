#!/usr/bin/env python3
"""curves.py: compares the losses that runs of the fault laboratory wrote to metrics.jsonl. Standard library only.

    curves.py draw TITLE OUT.svg OUT.json FAULTY HEALTHY ONE_RANK HALF_RATE SEED…   draws curves, prints distances
    curves.py tell OUT.json     prints the distance in one line
    curves.py row OUT.json NUMBER TITLE CHECK LINE     prints a row of dev/results/fault-lab.md
    curves.py compare FIRST SECOND NAME…   do two runs have equal digits in each step that the second one has?

FAULTY, HEALTHY: runs with the same options and seed. ONE_RANK: the healthy program on one rank, with the same samples.
HALF_RATE: the same with half the learning rate. SEED…: the same with other seeds, which shuffle and initialize
differently.
"""
import json
import math
import signal
import sys
from xml.sax.saxutils import escape

LAST = 50     # steps at the end of a run that are compared
SMOOTH = 20   # steps that a drawn point averages
SEEN = 0.02   # a smaller difference of two losses is less than the width of a line in the drawing
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 420, 56, 16, 40, 44
FIELDS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate"}


def read_steps(path):
    """The lines of the training steps, by step."""
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return {line["step"]: line for line in lines if "loss" in line}


def losses_of(path):
    steps = read_steps(path)
    if sorted(steps) != list(range(1, len(steps) + 1)):
        sys.exit(f"error: {path} does not have each step once: the run has not finished; start it again")
    return [steps[i + 1]["loss"] for i in range(len(steps))]


def mean(values):
    return sum(values) / len(values)


def distance(a, b):
    """The mean over the last steps of the difference between two runs in each step."""
    return mean([abs(x - y) for x, y in zip(a[-LAST:], b[-LAST:])])


def measure(faulty, healthy, one_rank, half_rate, seeds):
    """`visible`: what a reader needs in order to see the fault."""
    differences = [abs(x - y) for x, y in zip(faulty, healthy)]
    ends = [mean(run[-LAST:]) for run in [one_rank] + seeds]
    m = {"faulty": mean(faulty[-LAST:]), "healthy": mean(healthy[-LAST:]), "distance": distance(faulty, healthy),
         "largest": max(differences), "largest_step": differences.index(max(differences)) + 1,
         "layouts": distance(healthy, one_rank), "seeds": [min(ends), max(ends)], "seed_runs": len(ends),
         "half_rate": mean(half_rate[-LAST:])}
    half = (max(ends) - min(ends)) / 2
    low, high = min(ends) - half, max(ends) + half
    if not low <= m["faulty"] <= max(high, m["half_rate"]):
        m["visible"] = "alone"
    elif m["faulty"] > high:
        m["visible"] = "next to five seeds"
    elif distance(smoothed(faulty), smoothed(healthy)) > SEEN:
        m["visible"] = "next to a healthy run"
    elif m["distance"] > 3 * m["layouts"]:
        m["visible"] = "only in single steps"
    else:
        m["visible"] = "no"
    return m


def print_measures(m, steps):
    low, high = m["seeds"]
    side = "lower" if m["faulty"] < m["healthy"] else "higher"
    print(f"  mean loss of the last {LAST} of {steps} steps: faulty {m['faulty']:.4f}, healthy {m['healthy']:.4f}")
    print(f"  distance of the two curves, mean of the last {LAST} steps: {m['distance']:.4f} (largest in any step: "
          f"{m['largest']:.4f}, step {m['largest_step']})")
    print(f"  the same distance between the healthy program on these ranks and on one rank: {m['layouts']:.2g}")
    print(f"  the healthy program with {m['seed_runs']} seeds ends between {low:.4f} and {high:.4f}, with half the "
          f"learning rate at {m['half_rate']:.4f}")
    verdicts = {
        "alone": f"Visible: the faulty run ends {side} than another seed or half the learning rate explains.",
        "next to five seeds": "Visible only to those who have trained five seeds of this very configuration: the "
                              "faulty run ends\n  higher than these, but half the learning rate changes the end more.",
        "next to a healthy run": "Visible next to a healthy run with the same seed: the drawn lines are apart at the "
                                 "end.\n  Alone it is not visible: another seed changes the end as much.",
        "only in single steps": "Not visible: the drawn lines are one. Single steps differ by more than three times "
                                "what two healthy\n  layouts differ by, but no run has a healthy one with the same "
                                "seed and data next to it.",
        "no": "Not visible: the curves are at most three times as far apart as those of two healthy layouts."}
    print("  " + verdicts[m["visible"]])


def smoothed(losses):
    return [mean(losses[max(0, i - SMOOTH + 1):i + 1]) for i in range(len(losses))]


class Drawing:
    """Two panels: the losses, and the absolute difference of the losses on a logarithmic scale."""

    def __init__(self, title):
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                      'font-family="sans-serif">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
        self.text(LEFT, 18, title, 13, "start")

    def text(self, x, y, what, size=10, anchor="middle", color="#222222"):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
                          f'fill="{color}">{escape(what)}</text>')

    def grid(self, x0, x1, y0, y1, label=None):
        self.parts.append(f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#dddddd"/>')
        if label and y0 == y1:
            self.text(x0 - 4, y0 + 4, label, anchor="end")
        elif label:
            self.text(x0, max(y0, y1) + 14, label)

    def line(self, points, color, width, dashes=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{style}/>')

    def legend(self, x, y, color, what, dashes=""):
        self.line([(x, y - 3), (x + 22, y - 3)], color, 2, dashes)
        self.text(x + 27, y, what, anchor="start")

    def finish(self, path):
        with open(path, "w") as f:
            f.write("\n".join(self.parts + ["</svg>", ""]))


def draw_losses(drawing, runs, steps, left, right):
    """runs: (losses, color, line width, dashes, name or None), the first ones below the others."""
    top, bottom = TOP, HEIGHT - BOTTOM
    low = min(min(r[0][SMOOTH:]) for r in runs) - 0.05
    high = max(r[0][0] for r in runs) + 0.05

    def at(i, value):
        return left + (right - left) * i / steps, bottom - (bottom - top) * (value - low) / (high - low)

    for step in range(0, steps + 1, 100):
        x, _ = at(step, low)
        drawing.grid(x, x, bottom, top, str(step))
    for tenth in range(int(low * 2) + 1, int(high * 2) + 1):
        _, y = at(0, tenth / 2)
        drawing.grid(left, right, y, y, f"{tenth / 2:g}")
    named = 0
    for losses, color, width, dashes, name in runs:
        points = [at(i + 1, value) for i, value in enumerate(smoothed(losses))]
        drawing.line(points, color, width, dashes)
        if name:
            drawing.legend(left + 170, top + 14 + 15 * named, color, name, dashes)
            named += 1
    drawing.text((left + right) / 2, HEIGHT - 10, f"step; loss, mean of the last {SMOOTH} steps")


def draw_differences(drawing, runs, steps, left, right):
    """runs: (differences, color, name); decades from 1e-7 to 10."""
    top, bottom, lowest, decades = TOP, HEIGHT - BOTTOM, 1e-7, 8

    def at(i, value):
        return (left + (right - left) * i / steps,
                bottom - (bottom - top) * math.log10(max(value, lowest) / lowest) / decades)

    for step in range(0, steps + 1, 100):
        x, _ = at(step, lowest)
        drawing.grid(x, x, bottom, top, str(step))
    for decade in range(decades + 1):
        _, y = at(0, lowest * 10 ** decade)
        drawing.grid(left, right, y, y, f"1e{decade - 7:+d}")
    for number, (values, color, name) in enumerate(runs):
        drawing.line([at(i + 1, value) for i, value in enumerate(smoothed(values))], color, 1.5)
        drawing.legend(left + 110, bottom - 30 + 15 * number, color, name)
    drawing.text((left + right) / 2, HEIGHT - 10, f"step; difference from healthy, mean of the last {SMOOTH} steps")


def draw(title, path, json_path, *runs):
    faulty, healthy, one_rank, half_rate, *seeds = [losses_of(run) for run in runs]
    steps = len(healthy)
    m = measure(faulty, healthy, one_rank, half_rate, seeds)
    print_measures(m, steps)
    drawing = Drawing(title)
    middle = WIDTH / 2
    other_seeds = [(run, "#bbbbbb", 1, "", None if i else "healthy, other seeds") for i, run in enumerate(seeds)]
    other_seeds.append((half_rate, "#777777", 1, "1,3", "healthy, half the learning rate"))
    names = [(healthy, "#2b6cb0", 3, "", "healthy"), (faulty, "#d9480f", 1.5, "5,3", "faulty")]
    draw_losses(drawing, other_seeds + names, steps, LEFT, middle - 20)
    apart = [[abs(x - y) for x, y in zip(run, healthy)] for run in (one_rank, faulty)]
    draw_differences(drawing, [(apart[0], "#888888", "healthy on one rank"), (apart[1], "#d9480f", "faulty")], steps,
                     middle + 44, WIDTH - RIGHT)
    drawing.finish(path)
    with open(json_path, "w") as f:
        json.dump(m, f)


def compare(first, second, *name):
    """Prints a failing line that names the first step and figure that differ, or a passing one."""
    a, b = read_steps(first), read_steps(second)
    what = " ".join(name)
    if not b:
        sys.exit(f"error: {second} has no training step")
    for step in sorted(b):
        for field, word in FIELDS.items():
            if a[step][field] != b[step][field]:
                print(f"FAIL {what}: step {step}: {word} {b[step][field]!r}, expected {a[step][field]!r}")
                return 1
    print(f"pass {what}: losses, gradient norms and learning rates of {len(b)} steps have equal digits")
    return 0


def tell(path):
    """One line for an answer."""
    with open(path) as f:
        m = json.load(f)
    print(f"The curve: {m['distance']:.4f} from the healthy one at the end, {m['layouts']:.2g} between healthy layouts;"
          f" visible: {m['visible']}")
    return 0


def row(path, *cells):
    """A row of dev/results/fault-lab.md."""
    with open(path) as f:
        m = json.load(f)
    number, title, check, line = [cell.replace("|", "\\|") for cell in cells]
    figures = [f"{m['faulty']:.4f}", f"{m['healthy']:.4f}", f"{m['distance']:.4f}", f"{m['layouts']:.1e}",
               "{:.3f} to {:.3f}".format(*m["seeds"]), f"{m['half_rate']:.3f}"]
    print("| " + " | ".join([number, title] + figures + [m["visible"], check, f"`{line}`"]) + " |")
    return 0


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the reader of the output may end first
    commands = {"draw": draw, "compare": compare, "tell": tell, "row": row}
    if len(sys.argv) < 3 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    sys.exit(commands[sys.argv[1]](*sys.argv[2:]))


main()
