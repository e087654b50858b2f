#!/usr/bin/env python3
"""figures.py [NAME…]: draws the figures of the book, or those named, into docs/book/figures, each from fresh runs.
figures.py --check [--small] [NAME…]: draws nothing, but makes each figure's source again and compares what it would
draw with the structure that the committed figure says it has, and checks the figure itself (check_svg.py).
figures.py --list: the names. --folder DIR: where the figures are, or are drawn.

A figure is a function that gets a Source and returns a Drawing. drawing.structure is what the picture says apart from
times: names and order of events, ranks, categories. It is written into the figure's <metadata> together with the
commands and the commit. Needs Python's standard library only; the programs: `make figures` builds them.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import from_plans
import from_runs
import from_traces
from check_svg import problems_of, read_metadata
from sources import ROOT, Source

FIGURES = {**from_traces.FIGURES, **from_plans.FIGURES, **from_runs.FIGURES}
FOLDER = "docs/book/figures"


def commit():
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "none"


def drawn(source, name):
    source.used = []
    drawing = FIGURES[name](source)
    drawing.structure = json.loads(json.dumps(drawing.structure))  # as a file would give it back
    return drawing


def draw(source, names, folder):
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in names:
        begin = time.monotonic()
        drawing = drawn(source, name)
        path = folder / f"{name}.svg"
        drawing.write(path, {"commands": source.used, "commit": commit(), "structure": drawing.structure})
        problems = problems_of(path)
        failed += len(problems)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KB, {time.monotonic() - begin:.1f} s")
        for problem in problems:
            print(f"  {problem}")
    return failed


def difference(committed, fresh, where="structure"):
    """Where two structures differ, in words; None: nowhere."""
    if isinstance(committed, dict) and isinstance(fresh, dict):
        for key in [*committed, *(k for k in fresh if k not in committed)]:
            if key not in committed or key not in fresh:
                return f"{where}: {key!r} is only in the {'fresh' if key in fresh else 'committed'} one"
            found = difference(committed[key], fresh[key], f"{where}, {key}")
            if found:
                return found
        return None
    if isinstance(committed, list) and isinstance(fresh, list):
        for i, (a, b) in enumerate(zip(committed, fresh)):
            found = difference(a, b, f"{where}, number {i}")
            if found:
                return found
        if len(committed) != len(fresh):
            return f"{where}: {len(committed)} entries committed, {len(fresh)} now"
        return None
    return None if committed == fresh else f"{where}: {committed!r} committed, {fresh!r} now"


def check(source, names, folder):
    passed = failed = 0
    for name in names:
        path = folder / f"{name}.svg"
        found = [f"{path} is missing: make figures draws it"]
        if path.is_file():
            found = problems_of(path)
        if not found:
            committed = read_metadata(path)["structure"]
            differs = difference(committed, drawn(source, name).structure)
            found = [f"{differs}; make figures redraws it"] if differs else []
        for problem in found:
            print(f"FAIL {name}: {problem}")
        failed += len(found)
        if not found:
            passed += 1
            count = len(json.dumps(committed))
            print(f"pass {name}: what a fresh run gives is what is drawn, {count} characters of structure")
    print(f"{passed} passed, {failed} failed")
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for flag in ("--check", "--small", "--list"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--folder", type=Path, default=ROOT / FOLDER)
    args = parser.parse_args()
    if args.small and not args.check:
        sys.exit("error: --small was given without --check; small runs are for checking only")
    names = args.names or list(FIGURES)
    unknown = [n for n in names if n not in FIGURES]
    if unknown:
        sys.exit(f"error: {unknown[0]} is not a figure; expected one of: {' '.join(FIGURES)}")
    if args.list:
        print("\n".join(FIGURES))
        return
    failed = (check if args.check else draw)(Source(small=args.small), names, args.folder.resolve())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
