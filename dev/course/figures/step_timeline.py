"""step_timeline.py: draws a training step of all ranks: what each computes, waits for and communicates, and where
communication is hidden behind computing."""

from sources import short
from svg import BLUE, GRAY, ORANGE, YELLOW, Drawing, text_width

LANE, COLLECTIVE, GAP = 24, 14, 14  # heights: of a compute lane, of a collective's lane, between ranks
LEFT, RIGHT = 62, 12
COLORS = {
    "forward": "#9bd3b9",
    "loss": YELLOW,
    "backward": "#e3b4cd",
    "optimizer": GRAY,
    "all_gather": BLUE,
    "reduce_scatter": ORANGE,
}
HIDDEN = "#eaf3fa"
WORDS = {
    "forward": "forward",
    "loss": "head and loss",
    "backward": "backward",
    "optimizer": "AdamW",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


def pack(events):
    """Gives each event the first lane that is free at its start. Returns the number of lanes."""
    ends = []
    for e in sorted(events, key=lambda e: e["at"]):
        lane = next((i for i, end in enumerate(ends) if end <= e["at"] + 1e-9), len(ends))
        ends[lane : lane + 1] = [e["at"] + e["ms"]]
        e["lane"] = lane
    return len(ends)


def merge(spans):
    """Overlapping (begin, end) as one."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return merged


def subtract(spans, holes):
    """The parts of merged spans that are in none of the merged holes."""
    left = []
    for begin, end in spans:
        for hole_begin, hole_end in holes:
            if hole_end <= begin or hole_begin >= end:
                continue
            if hole_begin > begin:
                left.append([begin, hole_begin])
            begin = max(begin, hole_end)
            if begin >= end:
                break
        if begin < end:
            left.append([begin, end])
    return left


def is_shown(event):
    return event["cat"] == "communication" and event["name"].split(":")[0] in ("all_gather", "reduce_scatter")


def shown(events, hides=("report", "samples")):
    """The collectives of a rank that are drawn: not those of a few bytes over world."""
    return [e for e in events if is_shown(e) and not any(word in e["name"] for word in hides)]


def hidden(events):
    """(begin, end) of the times in which a rank communicates and does not wait, and their share of communication."""
    busy = merge([(e["at"], e["at"] + e["ms"]) for e in shown(events)])
    waits = merge([(e["at"], e["at"] + e["ms"]) for e in events if e["cat"] == "wait"])
    spans = subtract(busy, waits)
    whole = sum(end - begin for begin, end in busy)
    return spans, sum(end - begin for begin, end in spans) / whole if whole else 0


class StepTimeline:
    """One step of some ranks in a drawing of its own height."""

    def __init__(self, width, length, title, desc, heading, below="", top=78):
        self.d = Drawing(width, 0, title, desc)
        self.window(0, length)
        self.d.heading(heading, below)
        self.waiting = self.d.hatch("waiting", "#777777")
        self.y = top

    def window(self, begin, length):
        """What is drawn from now on is the time from `begin` to begin + length, in ms."""
        self.begin, self.length, self.scale = begin, length, (self.d.width - LEFT - RIGHT) / length

    def x(self, ms):
        return LEFT + (ms - self.begin) * self.scale

    def legend(self, kinds, y=66, shading=True):
        entries = [(COLORS[k], WORDS[k]) for k in kinds] + [(self.waiting, "waiting")]
        if shading:
            entries.append((HIDDEN, "communication hidden"))
        self.d.legend(16, y, entries, 11, 12)

    def rank(self, name, events):
        """Draws a rank's lanes below what is drawn."""
        d, y = self.d, self.y
        groups = [[e for e in shown(events) if e["name"].startswith(kind)] for kind in ("all_gather", "reduce_scatter")]
        lanes = [pack(group) for group in groups]
        height = LANE + 2 + COLLECTIVE * sum(lanes)
        for begin, end in hidden(events)[0]:
            d.box(self.x(begin), y - 3, (end - begin) * self.scale, height + 4, HIDDEN, stroke="none")
        d.text(6, y + LANE / 2 + 4, name, 12)
        for e in events:
            kind, _, unit = e["name"].partition(": ")
            if e["cat"] == "phase" and kind in COLORS:
                self.event(e, y, LANE - 8, kind, short(unit) if unit else "")
        for e in events:
            if e["cat"] == "wait":
                title = f"{e['name']}: {e['ms']:.1f} ms"
                d.box(self.x(e["at"]), y + LANE - 7, e["ms"] * self.scale, 6, self.waiting, title=title)
        y += LANE + 2
        for group, count in zip(groups, lanes):
            for e in group:
                kind, _, unit = e["name"].partition(": ")
                self.event(e, y + e["lane"] * COLLECTIVE, COLLECTIVE - 2, kind, short(unit))
            y += count * COLLECTIVE
        self.y = y + GAP

    def event(self, e, y, height, kind, label):
        title = f"{e['name']}: {e['ms']:.2f} ms"
        self.d.box(self.x(e["at"]), y, e["ms"] * self.scale, height, COLORS[kind], label, title)

    def ticks(self):
        """Writes the times below what is drawn."""
        steps = [f * 10**p for p in range(-3, 6) for f in (1, 2, 5)]
        tick = next(t for t in steps if self.length / t <= 12)
        for i in range(int(self.length / tick) + 1):
            words = f"{i * tick:g}" + (" ms" if i == 0 else "")
            anchor = "start" if i == 0 else "middle"
            x = self.x(self.begin + i * tick)
            if x + text_width(words, 11) / 2 < self.d.width:
                self.d.text(x, self.y + 2, words, 11, anchor, "#555555")
        self.y += 14

    def finish(self):
        """Writes the times below, and fixes the height."""
        self.ticks()
        self.d.height = self.y
        return self.d
