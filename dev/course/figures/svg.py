"""svg.py: drawings as SVG, and the axes and ticks of charts. Needs Python's standard library only.

A Drawing has a white background of its own, so that it is readable on a dark page. Its texts are estimated by the
widths of DejaVu Sans, which is wider than most fonts that a browser takes for sans-serif. check_svg.py estimates with
the same widths whether texts overlap.
"""

import json
import math
from xml.sax.saxutils import escape

INK, DIM, GRID = "#222222", "#555555", "#dddddd"
# Okabe and Ito's palette, which color-blind readers can tell apart, with lighter shades of it for large areas.
BLUE, SKY, GREEN, YELLOW, ORANGE, RED, PURPLE, GRAY = (
    "#0072b2",
    "#8fcbf0",
    "#009e73",
    "#f0e442",
    "#e69f00",
    "#d55e00",
    "#cc79a7",
    "#bbbbbb",
)
AXIS_COLORS = {"tp": BLUE, "cp": GREEN, "pp": ORANGE, "fsdp": PURPLE, "dp_replicate": SKY, "world": GRAY}

# Widths of characters in thousandths of the font size.
WIDTHS = {}
for width, characters in (
    (280, "'ijl"),
    (300, "IJ"),
    (330, " ,.·"),
    (360, "/:;\\|f-"),
    (400, "()[]t!r"),
    (500, '"*_`sz?'),
    (560, "cL"),
    (590, "Fkvxy"),
    (625, "PTYaoeESbdghnpqu$0123456789{}"),
    (690, "KAVBRXZCU"),
    (770, "HNDGOQ&"),
    (840, "w#+<=>^~×→↑M"),
    (1000, "%mW@…—"),
):
    WIDTHS.update(dict.fromkeys(characters, width))


def text_width(words, size):
    """Pixels that a text takes, at most."""
    return sum(WIDTHS.get(c, 700) for c in words) * size / 1000


def ink_on(color):
    """Black or white: what is legible on a background (WCAG's relative luminance)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return "#ffffff" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.22 else INK


def text(x, y, words, size=11, anchor="start", more="", color=INK):
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{color}"{more}>{escape(words)}</text>'


def line(x1, y1, x2, y2, color=GRID, more=""):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def ticks(low, high, log, most=6):
    """Values to write at an axis from low to high."""
    if log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1,) if math.log10(high / low) > 2 else (1, 2, 5)
        found = [f * 10.0**p for p in powers for f in factors]
        return [v for v in found if low <= v * 1.0000001 and v <= high]
    step = 10 ** math.floor(math.log10((high - low) / 4))
    step *= next((f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= most), 20)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number(value, log=False):
    if value == 0:
        return "0"
    if log and not 1e-2 <= value < 1e4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.4g}"


def amount(value, unit):
    """1234567 bytes -> '1.23 MB'"""
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


class Axis:
    """Places values of [low, high] between pixel `at` and at + length."""

    def __init__(self, values, log, at, length, room=0.04):
        positive = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
        low, high = min(positive), max(positive)
        room *= (math.log(high / low) if log else high - low) or 1
        self.low, self.high = (low / math.exp(room), high * math.exp(room)) if log else (low - room, high + room)
        self.log, self.at, self.length = log, at, length

    def place(self, value):
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.at + share * self.length


class Drawing:
    """A picture of `width` x `height` pixels. `title` and `desc` are what readers hear who do not see it."""

    def __init__(self, width, height, title="", desc=""):
        self.width, self.height, self.title, self.desc = width, height, title, desc
        self.structure = None  # what is drawn, without times: see figures.py
        self.parts = []

    def add(self, *parts):
        self.parts += parts

    def text(self, x, y, words, size=12, anchor="start", color=INK, bold=False, turn=0):
        more = ' font-weight="bold"' if bold else ""
        if turn:
            more += f' transform="rotate({turn} {x:.1f} {y:.1f})"'
        self.add(text(x, y, words, size, anchor, more, color))

    def line(self, x1, y1, x2, y2, color=INK, width=1.0, dash=""):
        more = f' stroke-width="{width}"' + (f' stroke-dasharray="{dash}"' if dash else "")
        self.add(line(x1, y1, x2, y2, color, more))

    def polyline(self, points, color, width=2.0, dash=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self.add(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{more}/>')

    def polygon(self, points, fill, stroke="none"):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polygon points="{path}" fill="{fill}" stroke="{stroke}"/>')

    def circle(self, x, y, r, fill, stroke=INK):
        self.add(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" fill="{fill}" stroke="{stroke}"/>')

    def arrow(self, x1, y1, x2, y2, color=INK, width=1.2):
        """A line with a head at (x2, y2)."""
        length = math.hypot(x2 - x1, y2 - y1) or 1
        dx, dy = 6 * (x2 - x1) / length, 6 * (y2 - y1) / length
        self.line(x1, y1, x2 - dx, y2 - dy, color, width)
        self.polygon([(x2, y2), (x2 - dx - dy / 2, y2 - dy + dx / 2), (x2 - dx + dy / 2, y2 - dy - dx / 2)], color)

    def box(self, x, y, width, height, fill, label="", title="", size=11, stroke="#555555", more=""):
        """A rectangle, with a label in it if that fits, and a title that a pointer shows."""
        inner = f"><title>{escape(title)}</title></rect>" if title else "/>"
        self.add(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.6):.1f}" height="{height:.1f}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="0.5"{more}{inner}'
        )
        if label and text_width(label, size) + 3 <= width and height >= size:
            color = ink_on(fill) if fill.startswith("#") else INK
            self.text(x + width / 2, y + height / 2 + 0.36 * size, label, size, "middle", color)

    def hatch(self, name, color, back="#ffffff"):
        """A pattern of stripes; use it as a fill of `box`."""
        self.add(
            f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{back}"/>'
            f'<rect width="2.4" height="6" fill="{color}"/></pattern></defs>'
        )
        return f"url(#{name})"

    def legend(self, x, y, entries, size=12, gap=18):
        """Entries (fill, words) side by side. Returns the x after them."""
        for fill, words in entries:
            self.box(x, y - 10, 13, 11, fill)
            self.text(x + 18, y, words, size)
            x += 18 + text_width(words, size) + gap
        return x

    def heading(self, words, below=""):
        self.text(16, 24, words, 15, bold=True)
        if below:
            self.text(16, 43, below, 12, color=DIM)

    def svg(self, metadata=None):
        size = f'viewBox="0 0 {self.width} {self.height:.0f}"'
        head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">']
        if self.title:
            head += [f"<title>{escape(self.title)}</title>", f"<desc>{escape(self.desc)}</desc>"]
        if metadata is not None:
            said = json.dumps(metadata, indent=1, ensure_ascii=False)
            head.append(f"<metadata>{escape(said)}</metadata>")
        back = f'<rect width="{self.width}" height="{self.height:.0f}" fill="#ffffff"/>'
        return "\n".join([*head, back, *self.parts, "</svg>", ""])

    def write(self, path, metadata=None):
        with open(path, "w", encoding="utf-8") as f:
            f.write(self.svg(metadata))


class Plot:
    """The frame of a chart in a drawing: axes with grid, ticks and labels, inside the pixels `box` (x, y, w, h)."""

    def __init__(self, drawing, box, xs, ys, log_x=False, log_y=False, room=0.04):
        self.d, (self.x0, self.y0, self.w, self.h) = drawing, box
        self.x = Axis(xs, log_x, self.x0, self.w, room)
        self.y = Axis(ys, log_y, self.y0 + self.h, -self.h, room)

    def frame(self, x_label, y_label, x_text=None, y_text=None, most=6):
        d, bottom = self.d, self.y0 + self.h
        for v in ticks(self.x.low, self.x.high, self.x.log, most):
            x = self.x.place(v)
            d.line(x, self.y0, x, bottom, GRID)
            d.text(x, bottom + 16, x_text(v) if x_text else number(v, self.x.log), 11, "middle")
        for v in ticks(self.y.low, self.y.high, self.y.log, most):
            y = self.y.place(v)
            d.line(self.x0, y, self.x0 + self.w, y, GRID)
            d.text(self.x0 - 6, y + 4, y_text(v) if y_text else number(v, self.y.log), 11, "end")
        d.line(self.x0, bottom, self.x0 + self.w, bottom, DIM)
        d.line(self.x0, self.y0, self.x0, bottom, DIM)
        d.text(self.x0 + self.w / 2, bottom + 34, x_label, 12, "middle")
        d.text(self.x0 - 46, self.y0 + self.h / 2, y_label, 12, "middle", turn=-90)

    def at(self, x, y):
        return self.x.place(x), self.y.place(y)

    def curve(self, xs, ys, color, width=2.0, dash=""):
        self.d.polyline([self.at(x, y) for x, y in zip(xs, ys) if y > 0 or not self.y.log], color, width, dash)
