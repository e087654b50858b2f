#!/usr/bin/env python3
"""make_page.py BUILD PAGE: puts the planner's page together, one file without external parts: the program as compressed
WebAssembly in both precisions, the cluster files, and what dev/course/planner/of_program.c prints."""
import base64
import gzip
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).parent


def inert(text):
    """JSON or a script within <script>: no end tag in it."""
    return text.replace("</", "<\\/")


def main():
    build, page = map(pathlib.Path, sys.argv[1:])
    program = json.loads((build / "program.json").read_text())
    style = program.pop("style")
    program["clusters"] = {file.stem: file.read_text() for file in sorted(HERE.parents[1].glob("clusters/*.json"))}
    modules = {precision: base64.b64encode(gzip.compress((build / f"{precision}.wasm").read_bytes(), mtime=0)).decode()
               for precision in ("bf16", "fp32")}
    commit = re.search('"(.*)"', (build / "commit.c").read_text()).group(1)
    parts = {
        "STYLE": style + (HERE / "page.css").read_text(),
        "COMMIT": commit,
        "VECTORS": str(program.pop("vector_floats")),
        "PROGRAM": inert(json.dumps(program)),
        "MODULES": json.dumps(modules),
        "DRAW": inert((HERE.parents[1] / "pages" / "page.js").read_text()),
        **{name.upper(): inert((HERE / f"{name}.js").read_text()) for name in ("run", "worker", "settings", "page")},
    }
    text = re.sub("@([A-Z]+)@", lambda match: parts[match.group(1)], (HERE / "page.html").read_text())
    page.write_text(text)
    print(f"{page}: {page.stat().st_size / 1e6:.1f} MB")


main()
