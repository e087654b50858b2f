"""learn_charts.py: line charts as one SVG, for learn.py. Needs Python's standard library only.

A panel is a dictionary: title, x and y (labels), log_x and log_y, and series. A series has a label, a color, xs and ys,
and optionally dash (an SVG dash pattern), width, and dots (1: points without a line). Panels come two in a row.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "figures"))
from svg import Axis, line, number, text, ticks  # noqa: E402

WIDTH, HEIGHT = 500, 330  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 46
COLORS = {
    "ours": "#c0392b",
    "second": "#e08e0b",
    "transformers": "#2471a3",
    "litgpt": "#1e8449",
    "apart": "#7d3c98",
    "bound": "#555555",
}


def binned(xs, ys, count=220, pick=None):
    """At most `count` points: of each bin of neighbors the mean, or pick(values), such as max."""
    size = max(1, math.ceil(len(xs) / count))
    pick = pick or (lambda values: sum(values) / len(values))
    bins = range(0, len(xs), size)
    return [xs[min(i + size, len(xs)) - 1] for i in bins], [pick(ys[i : i + size]) for i in bins]


def draw_series(s, x_axis, y_axis):
    points = [(x_axis.place(x), y_axis.place(y)) for x, y in zip(s["xs"], s["ys"]) if y > 0 or not y_axis.log]
    if s.get("dots"):
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{s["color"]}"/>' for x, y in points]
    dash = f' stroke-dasharray="{s["dash"]}"' if s.get("dash") else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f'fill="none" stroke="{s["color"]}" stroke-width="{s.get("width", 1.5)}"'
    return [f'<polyline points="{path}" {style}{dash}/>']


def draw_legend(series, x, y):
    named = [s for s in series if s["label"]]
    width = 36 + 6 * max(len(s["label"]) for s in named)
    back = f'x="{x - 4:.1f}" y="{y - 13:.1f}" width="{width}" height="{16 * len(named) + 3}"'
    parts = [f'<rect {back} fill="#ffffff" fill-opacity="0.8"/>']
    for i, s in enumerate(named):
        at = y + 16 * i
        dash = f' stroke-dasharray="{s["dash"]}"' if s.get("dash") else ""
        if s.get("dots"):
            parts.append(f'<circle cx="{x + 11:.1f}" cy="{at - 4:.1f}" r="3.5" fill="none" stroke="{s["color"]}"/>')
        else:
            parts.append(line(x, at - 4, x + 22, at - 4, s["color"], f' stroke-width="{s.get("width", 1.5)}"{dash}'))
        parts.append(text(x + 28, at, s["label"]))
    return parts


def draw_panel(panel, left, top):
    series = panel["series"]
    x_axis = Axis([x for s in series for x in s["xs"]], panel.get("log_x"), left + LEFT, WIDTH - LEFT - RIGHT)
    y_axis = Axis(
        [y for s in series for y in s["ys"]], panel.get("log_y"), top + HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT
    )
    bottom, right = top + HEIGHT - BOTTOM, left + WIDTH - RIGHT
    parts = [text(left + LEFT, top + 18, panel["title"], 13)]
    for value in ticks(x_axis.low, x_axis.high, x_axis.log):
        x = x_axis.place(value)
        parts += [line(x, top + TOP, x, bottom), text(x, bottom + 15, number(value, x_axis.log), 10, "middle")]
    for value in ticks(y_axis.low, y_axis.high, y_axis.log):
        y = y_axis.place(value)
        parts += [line(left + LEFT, y, right, y), text(left + LEFT - 5, y + 4, number(value, y_axis.log), 10, "end")]
    for s in series:
        parts += draw_series(s, x_axis, y_axis)
    middle = (top + TOP + bottom) / 2
    parts.append(text((left + LEFT + right) / 2, bottom + 33, panel["x"], 11, "middle"))
    turned = f' transform="rotate(-90 {left + 14} {middle:.0f})"'
    parts.append(text(left + 14, middle, panel["y"], 11, "middle", turned))
    entries = sum(1 for s in series if s["label"])
    low_corner = panel.get("legend") == "below"
    x = left + LEFT + 12 if low_corner else right - 200
    return parts + draw_legend(series, x, bottom - 16 * entries + 4 if low_corner else top + TOP + 18)


def draw(panels, path):
    rows = (len(panels) + 1) // 2
    width, height = (2 if len(panels) > 1 else 1) * WIDTH, rows * HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, panel in enumerate(panels):
        parts += draw_panel(panel, i % 2 * WIDTH, i // 2 * HEIGHT)
    path.write_text("\n".join(parts) + "\n</svg>\n", encoding="utf-8")
