"""follow_run.py: a run's metrics.jsonl in TensorBoard, Weights & Biases or MLflow, while the run goes on.

    python dev/pytorch/follow_run.py out/a                # pip install torch tensorboard, or tensorboardX
    tensorboard --logdir out/a/tensorboard
    python dev/pytorch/follow_run.py out/a --to wandb     # pip install wandb; WANDB_PROJECT and WANDB_MODE hold
    python dev/pytorch/follow_run.py out/a --to mlflow    # pip install mlflow; MLFLOW_TRACKING_URI holds

OUT is the --out directory of a run, which may start later. Every number of a line becomes a scalar: loss, val_loss,
memory/params, bytes/fsdp, wait_axis_s/tp and so on, and a line about a step with an outlier becomes outlier_z. A value
that is null, such as a loss that is not finite, is left out, and so is a line that is not a JSON object with a step.

It ends when run-data.js says that the run has ended, or at Ctrl-C; --once reads what is there and ends. A run that had
ended before is given a minute to be resumed. OUT/follow-NAME.json keeps the id of the run there and the last step of
each kind of line. When training is resumed, and when this script is started again, the same run continues, and steps
that were written already are left out. If the script is killed before it has noted the lines that it has just written,
it writes them again.
"""

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

NOT_SCALARS = {"step", "ranks"}  # the figures of each rank are lists
PATIENCE = 60  # seconds that a run which had ended before is given to be resumed


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


def parse(text):
    """The kind, the step and the scalars of a line. Raises ValueError if it is not a JSON object with a step."""
    try:
        line = json.loads(text)
        step = int(line["step"])
    except (KeyError, TypeError) as error:
        raise ValueError(text) from error
    if "outlier" in line:  # the step has a line of its own, too
        return "outlier", step, dict(scalars({"outlier_z": line.get("z")}))
    return "validation" if "val_loss" in line else "step", step, dict(scalars(line))


class TensorBoard:
    """Writes event files to OUT/tensorboard; each start of this script adds one."""

    def __init__(self, out, run_id):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.id = run_id or "tensorboard"
        # tensorboardX names a file by the second alone, and would overwrite that of a start in the same second
        self.writer = SummaryWriter(str(out / self.id), filename_suffix=f".{os.getpid()}")

    def write(self, step, values):
        for tag, value in values.items():
            self.writer.add_scalar(tag, value, step)

    def flush(self):
        self.writer.flush()

    def close(self):
        self.writer.close()


class Wandb:
    def __init__(self, out, run_id):
        import wandb

        project = os.environ.get("WANDB_PROJECT", "llama3")
        self.run = wandb.init(project=project, name=out.resolve().name, id=run_id, resume="allow", dir=str(out))
        self.id = self.run.id

    def write(self, step, values):
        self.run.log(values, step=step)  # values of one step that come in several lines are merged

    def flush(self):
        pass

    def close(self):
        self.run.finish()


class Mlflow:
    def __init__(self, out, run_id):
        import mlflow

        self.mlflow = mlflow
        self.id = mlflow.start_run(run_id=run_id, run_name=None if run_id else out.resolve().name).info.run_id

    def write(self, step, values):
        self.mlflow.log_metrics(values, step=step)

    def flush(self):
        pass

    def close(self):
        self.mlflow.end_run()


TARGETS = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}
INSTALL = {"tensorboard": "pip install tensorboardX", "wandb": "pip install wandb", "mlflow": "pip install mlflow"}


class Metrics:
    """Reads the complete lines of metrics.jsonl that are new. Resuming truncates the file after the checkpoint's step;
    the last line that was read is then no longer where it was, and everything is read again."""

    def __init__(self, path):
        self.path = path
        self.offset = 0
        self.last = b""

    def lines(self):
        try:
            f = self.path.open("rb")
        except FileNotFoundError:
            return
        with f:
            f.seek(self.offset - len(self.last))
            if f.read(len(self.last)) != self.last:
                self.offset = 0
                f.seek(0)
            for line in f:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self.offset += len(line)
                self.last = line
                yield line


class State:
    """What OUT/follow-NAME.json keeps: the run's id, and the last step of each kind of line that was written."""

    def __init__(self, path):
        self.path = path
        try:
            kept = json.loads(path.read_text())
            self.id, self.steps = kept["id"], {kind: int(step) for kind, step in kept["steps"].items()}
        except FileNotFoundError:
            self.id, self.steps = None, {}
        except (ValueError, KeyError, TypeError, AttributeError):
            sys.exit(f"error: {path} is not what this script writes: remove it, and the run is written from its start")

    def save(self):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"id": self.id, "steps": self.steps}) + "\n")
        os.replace(new, self.path)


class Follower:
    def __init__(self, out, target, state):
        self.target = target
        self.state = state
        self.metrics = Metrics(out / "metrics.jsonl")
        self.run_data = out / "run-data.js"
        self.written = self.left_out = 0
        self.stopped = threading.Event()

    def stop(self, number, _):
        """Handles a signal. Lines that are being written are written to their end; a second signal ends the script."""
        signal.signal(number, signal.SIG_DFL)
        self.stopped.set()

    def read(self):
        """Writes the lines that are new. Returns whether the file had any."""
        found, written = False, self.written
        for text in self.metrics.lines():
            found = True
            try:
                kind, step, values = parse(text)
            except ValueError:
                self.left_out += 1
                continue
            if step <= self.state.steps.get(kind, 0):
                continue
            self.target.write(step, values)
            self.state.steps[kind] = step
            self.written += 1
        if self.written > written:
            self.target.flush()
            self.state.save()
        return found

    def ended(self):
        """When run-data.js was written, if it says that the run has ended; otherwise None."""
        try:
            with self.run_data.open("rb") as f:
                said = re.search(rb'"has_ended":(\d)', f.read(1000))
                return os.fstat(f.fileno()).st_mtime_ns if said and said[1] == b"1" else None
        except FileNotFoundError:
            return None

    def follow(self, every):
        """Reads until the run has ended. What run-data.js says at first may be about the run before this one."""
        before, quiet_since = self.ended(), time.monotonic()
        while not self.stopped.is_set():
            ended = self.ended()  # first, so that lines written before the end are read
            if self.read():
                quiet_since = time.monotonic()
            if ended and (ended != before or time.monotonic() - quiet_since > PATIENCE):
                return
            self.stopped.wait(every)


def main():
    parser = argparse.ArgumentParser(description="Follows a run in TensorBoard, Weights & Biases or MLflow.")
    parser.add_argument("out", type=Path, metavar="OUT", help="--out of the run")
    parser.add_argument("--to", choices=TARGETS, default="tensorboard", help="what it writes to (tensorboard)")
    parser.add_argument("--once", action="store_true", help="read what is there, and end")
    parser.add_argument("--every", type=float, default=2, metavar="SECONDS", help="how often it looks for lines (2)")
    options = parser.parse_args()
    if not options.out.is_dir():
        sys.exit(f"error: {options.out} is no directory: expected the --out directory of a run")
    if options.once and not (options.out / "metrics.jsonl").is_file():
        sys.exit(f"error: {options.out} has no metrics.jsonl: expected the --out directory of a run")
    state = State(options.out / f"follow-{options.to}.json")
    try:
        target = TARGETS[options.to](options.out, state.id)
    except ImportError as error:
        sys.exit(f"error: --to {options.to} needs a package that cannot be imported ({error}): {INSTALL[options.to]}")
    state.id = target.id
    state.save()
    follower = Follower(options.out, target, state)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, follower.stop)
    try:
        if options.once:
            follower.read()
        else:
            print(f"following {options.out} in {options.to}, run {target.id}; Ctrl-C ends it", flush=True)
            follower.follow(options.every)
    finally:
        target.close()
    note = f"; {follower.left_out} lines that are not JSON objects with a step were left out" * bool(follower.left_out)
    print(f"{options.out}: {follower.written} lines written to {options.to}, run {target.id}{note}")


if __name__ == "__main__":
    main()
