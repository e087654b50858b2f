"""to_tensorboard.py: metrics.jsonl as TensorBoard event files.

    pip install tensorboard
    python dev/pytorch/to_tensorboard.py out/a [out/b …] --logdir runs
    tensorboard --logdir runs

Each argument is the --out directory of a run, or a metrics.jsonl, and becomes a run of the same name under --logdir.
Every number of a line becomes a scalar: loss, val_loss, memory/params, bytes/fsdp, wait_axis_s/tp and so on. A line
about a step with an outlier becomes outlier_z. A value that is null, such as a loss that is not finite, is left out. A
line that is not a JSON object with a step, such as a torn last one, is left out too, and a note says how many there
were. A run that is converted again replaces its earlier event files.
"""

import argparse
import json
import sys
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

NOT_SCALARS = {"step", "ranks"}  # the figures of each rank are lists


def scalars(line, prefix=""):
    """Yields (tag, number) for every number in a line. rank_min_max has lists of two, source_epochs one per source."""
    for key, value in line.items():
        if key in NOT_SCALARS:
            continue
        if isinstance(value, dict):
            yield from scalars(value, f"{prefix}{key}/")
        elif key == "source_epochs":
            yield from ((f"{key}/{i}", number) for i, number in enumerate(value))
        elif isinstance(value, list) and prefix == "rank_min_max/":
            yield from ((f"{prefix}{key}/{name}", number) for name, number in zip(("min", "max"), value))
        elif isinstance(value, (int, float)):
            yield prefix + key, float(value)


def convert(path, folder):
    """Writes one run. Returns how many steps it has and how many lines were left out."""
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer, steps, left_out = EventFileWriter(str(folder)), 0, 0
    wall_time = path.stat().st_mtime
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
            step = int(line["step"])
        except (ValueError, KeyError, TypeError):
            left_out += 1
            continue
        if "outlier" in line:  # the step has a line of its own, too
            line = {"outlier_z": line.get("z")}
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars(line)]
        writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        steps += "loss" in line
    writer.close()
    return steps, left_out


def main():
    parser = argparse.ArgumentParser(description="Converts metrics.jsonl to TensorBoard event files.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="OUT", help="--out of a run, or a metrics.jsonl")
    parser.add_argument("--logdir", type=Path, default=Path("runs"), help="where the event files go (default: runs)")
    options = parser.parse_args()
    names = set()
    for run in options.runs:
        path = run / "metrics.jsonl" if run.is_dir() else run
        name = path.resolve().parent.name
        if not path.is_file():
            sys.exit(f"error: {run} has no metrics.jsonl: expected the --out directory of a run")
        if name in names:
            sys.exit(f"error: two runs are named {name}: convert one of them with another --logdir")
        names.add(name)
        steps, left_out = convert(path, options.logdir / name)
        note = f"; {left_out} lines that are not JSON objects with a step were left out" if left_out else ""
        print(f"{path}: {steps} steps in {options.logdir / name}{note}")


if __name__ == "__main__":
    main()
