"""to_tensorboard.py: metrics.jsonl as TensorBoard event files.

    pip install tensorboard
    python dev/pytorch/to_tensorboard.py out/a [out/b …] --logdir runs
    tensorboard --logdir runs

Each argument is the --out directory of a run, or a metrics.jsonl, and becomes a run of the same name under --logdir.
Every number of a line becomes a scalar: loss, val_loss, memory/params, bytes/fsdp, wait_axis_s/tp and so on. A line
about a step with an outlier becomes outlier_z. A value that is null, such as a loss that is not finite, is left out. A
line that is not a JSON object with a step, such as a torn last one, is left out too, and a note says how many there
were. A run that is converted again replaces its earlier event files. follow_run.py follows a run while it goes on.
"""

import argparse
import sys
from pathlib import Path

from follow_run import parse
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def convert(path, folder):
    """Writes one run. Returns how many steps it has and how many lines were left out."""
    for earlier in folder.glob("events.out.tfevents.*"):
        earlier.unlink()
    writer, steps, left_out = EventFileWriter(str(folder)), 0, 0
    wall_time = path.stat().st_mtime
    for text in path.read_text(errors="replace").splitlines():
        try:
            kind, step, found = parse(text)
        except ValueError:
            left_out += 1
            continue
        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in found.items()]
        writer.add_event(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))
        steps += kind == "step"
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
