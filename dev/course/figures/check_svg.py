"""check_svg.py FILE…: checks that a figure is well-formed, has a title, a description and metadata, a background of its
own, and that no text is small, leaves the picture or overlaps another text. Widths of texts are those of svg.py."""

import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree

from svg import text_width

SVG = "{http://www.w3.org/2000/svg}"
LEAST_SIZE, MOST_WIDTH, MOST_HEIGHT = 11, 1000, 620


def read_metadata(path):
    root = ElementTree.parse(path).getroot()
    return json.loads(root.find(f"{SVG}metadata").text)


def boxes_of(root):
    """(words, left, top, right, bottom) of each text, from its estimated width."""
    found = []
    for element in root.iter(f"{SVG}text"):
        words = "".join(element.itertext())
        x, y, size = (float(element.get(key)) for key in ("x", "y", "font-size"))
        width = text_width(words, size) * (1.06 if element.get("font-weight") == "bold" else 1)
        left = {"start": 0, "middle": -width / 2, "end": -width}[element.get("text-anchor", "start")]
        corners = [(left, -0.75 * size), (left + width, -0.75 * size), (left, 0.2 * size), (left + width, 0.2 * size)]
        turned = re.match(r"rotate\((-?[\d.]+)", element.get("transform") or "")
        angle = math.radians(float(turned.group(1))) if turned else 0
        cos, sin = math.cos(angle), math.sin(angle)
        placed = [(x + cos * dx - sin * dy, y + sin * dx + cos * dy) for dx, dy in corners]
        xs, ys = zip(*placed)
        found.append((words, size, min(xs), min(ys), max(xs), max(ys)))
    return found


def text_problems(root, width, height):
    boxes = boxes_of(root)
    problems = []
    for words, size, left, top, right, bottom in boxes:
        if size < LEAST_SIZE:
            problems.append(f"the text '{words}' has {size:g} px, at least {LEAST_SIZE} are legible")
        if left < 0 or top < 0 or right > width or bottom > height:
            problems.append(f"the text '{words}' leaves the picture: x {left:.0f} to {right:.0f} of {width:.0f}, "
                            f"y {top:.0f} to {bottom:.0f} of {height:.0f}")  # fmt: skip
    for i, (words, _, left, top, right, bottom) in enumerate(boxes):
        for other, _, left2, top2, right2, bottom2 in boxes[i + 1 :]:
            if min(right, right2) - max(left, left2) > 0.5 and min(bottom, bottom2) - max(top, top2) > 0.5:
                problems.append(f"the texts '{words}' and '{other}' overlap")
    return problems


def problems_of(path):
    """What is wrong with a figure, a sentence each."""
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, UnicodeDecodeError) as error:
        return [f"not well-formed XML: {error}"]
    problems = []
    for tag in ("title", "desc", "metadata"):
        element = root.find(f"{SVG}{tag}")
        if element is None or not (element.text or "").strip():
            problems.append(f"has no <{tag}>")
    if not problems:
        try:
            metadata = json.loads(root.find(f"{SVG}metadata").text)
            missing = [key for key in ("commands", "commit", "structure") if not metadata.get(key)]
            problems += [f"its metadata lack '{key}'" for key in missing]
        except ValueError as error:
            problems.append(f"its metadata are not JSON: {error}")
    view = (root.get("viewBox") or "").split()
    if len(view) != 4:
        return problems + ["has no viewBox"]
    width, height = float(view[2]), float(view[3])
    if width > MOST_WIDTH or height > MOST_HEIGHT:
        problems.append(f"is {width:.0f} x {height:.0f}, at most {MOST_WIDTH} x {MOST_HEIGHT}")
    back = root.find(f"{SVG}rect")
    covers = back is not None and [back.get("width"), back.get("height")] == view[2:]
    if not covers and "prefers-color-scheme" not in "".join(root.itertext()):
        problems.append("has neither a background of its own nor colors for dark pages")
    return problems + text_problems(root, width, height)


if __name__ == "__main__":
    found = {path: problems_of(path) for path in sys.argv[1:]}
    for path, problems in found.items():
        for problem in problems:
            print(f"{path}: {problem}")
    sys.exit(any(found.values()))
