#!/usr/bin/env python3
"""follow_run_test.py [PROGRAM | --possible]: dev/pytorch/follow_run.py writes each line of metrics.jsonl once, whatever
happens to the run and to the script, and ends with the run.

PROGRAM is train_llama3, which makes the files of one check; the other checks write such files themselves. What is
written to TensorBoard is read from its event files. Weights & Biases, offline, and MLflow are checked if they are
installed. --possible: exit code 0 if TensorBoard's packages are installed.
"""

import importlib.util
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
SCRIPT = TOP / "dev" / "pytorch" / "follow_run.py"


def has(name):
    return importlib.util.find_spec(name) is not None


if sys.argv[1:] == ["--possible"]:
    sys.exit(not (has("tensorboard") and (has("torch") or has("tensorboardX"))))

from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader  # noqa: E402

PROGRAM = Path(sys.argv[1] if len(sys.argv) > 1 else TOP / "build" / "cpu-fp32" / "train_llama3").resolve()
LIMIT = 120  # seconds that one start of the script may take
counts = {"pass": 0, "FAIL": 0}


def check(name, holds, what):
    word = "pass" if holds else "FAIL"
    counts[word] += 1
    print(f"{word} {name}: {str(what)[:300]}", flush=True)


def line_of_step(step, **more):
    loss = 8.0 - step / 16
    return {"step": step, "loss": loss, "lr": 1e-3, "memory": {"params": 1000}, "ranks": [[1, 2]]} | more


def lines_of(first, last):
    """Lines as the program writes them: every fourth step is followed by a validation."""
    for step in range(first, last + 1):
        yield line_of_step(step)
        if step % 4 == 0:
            yield {"step": step, "val_loss": 9.0 - step / 16, "val_tokens": 64}


def add(out, lines, mode="a"):
    with (out / "metrics.jsonl").open(mode) as f:
        f.writelines(json.dumps(line) + "\n" for line in lines)


def has_ended(out, value):
    (out / "run-data.js").write_text(f'var run_data = {{"has_ended":{value},"written":1}};\n')


def start(out, *options, **environment):
    command = [sys.executable, SCRIPT, out, "--every", "0.1", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=dict(os.environ, **environment), **pipes)


def finish(process):
    """The exit code and the last line of what was printed."""
    said, errors = process.communicate(timeout=LIMIT)
    return process.returncode, ((errors if process.returncode else said).strip().splitlines() or [""])[-1]


def once(out, *options, **environment):
    return finish(start(out, "--once", *options, **environment))


def events(out, tag):
    """All (step, value) of a scalar in the event files of OUT, in the order in which they were written."""
    found = []
    for path in sorted((out / "tensorboard").glob("events.*"), key=lambda path: path.stat().st_mtime_ns):
        for event in LegacyEventFileLoader(str(path)).Load():
            found += [(event.step, round(v.simple_value, 4)) for v in event.summary.value if v.tag == tag]
    return found


def wait_for(out, step):
    """Waits until the script has noted the step."""
    state = out / "follow-tensorboard.json"
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if state.is_file() and json.loads(state.read_text())["steps"].get("step", 0) >= step:
            return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not written")


def losses(first, last):
    return [(step, 8.0 - step / 16) for step in range(first, last + 1)]


def validations(last):
    return [(step, 9.0 - step / 16) for step in range(4, last + 1, 4)]


def check_once(out):
    add(out, lines_of(1, 8))
    code, said = once(out)
    holds = code == 0 and events(out, "loss") == losses(1, 8) and events(out, "val_loss") == validations(8)
    check("--once writes the losses of training and validation", holds, said)
    nested = events(out, "memory/params") == [(step, 1000.0) for step in range(1, 9)]
    check("numbers within a line's objects have scalars of their own", nested, "memory/params")
    code, said = once(out)
    check("a second time it writes nothing", code == 0 and " 0 lines" in said and len(events(out, "loss")) == 8, said)
    run_id = json.loads((out / "follow-tensorboard.json").read_text())["id"]
    add(out, lines_of(1, 6), "w")  # resumed from step 4, and killed after step 6
    add(out, lines_of(7, 12))
    code, said = once(out)
    holds = code == 0 and events(out, "loss") == losses(1, 12) and events(out, "val_loss") == validations(12)
    check("steps that a resumed run repeats are not written twice", holds, said)
    kept = json.loads((out / "follow-tensorboard.json").read_text())["id"]
    check("the id of the run is kept in OUT", kept == run_id, kept)


def check_odd_lines(out):
    add(out, [line_of_step(1, loss=None), line_of_step(2), {"data": "0123"}, {"step": 3, "outlier": "loss", "z": 7.5}])
    with (out / "metrics.jsonl").open("a") as f:
        f.write('[1, 2]\nnonsense\n{"step":4,"loss":')
    code, said = once(out)
    holds = events(out, "loss") == losses(2, 2) and events(out, "lr")[0][0] == 1
    check("a loss that is null is left out, and the rest of its line is not", code == 0 and holds, said)
    check("lines that are not JSON objects with a step are counted", "; 3 lines that are not" in said, said)
    check("an outlier has a scalar of its own", events(out, "outlier_z") == [(3, 7.5)], events(out, "outlier_z"))
    with (out / "metrics.jsonl").open("a") as f:
        f.write("7.75}\n")
    once(out)
    check("a torn last line is read when it is complete", events(out, "loss")[1:] == [(4, 7.75)], events(out, "loss"))


def check_following(out):
    has_ended(out, 0)
    process = start(out)
    time.sleep(0.5)
    add(out, lines_of(1, 5))
    wait_for(out, 5)
    resumed = [*lines_of(1, 3), *(line_of_step(step, note="x" * 1000) for step in range(4, 9))]
    add(out, resumed, "w")  # truncated by a resume, and longer than before when the script looks again
    wait_for(out, 8)
    add(out, lines_of(9, 12))
    has_ended(out, 1)
    code, said = finish(process)
    check("it follows a run that starts after it, and ends with the run", code == 0, said)
    holds = events(out, "loss") == losses(1, 12) and "left out" not in said
    check("it follows a run that is resumed meanwhile", holds, f"{len(events(out, 'loss'))} of 12 steps, each once")


def check_signals(out):
    add(out, lines_of(1, 4))
    for name in ("SIGINT", "SIGTERM"):
        process = start(out)
        process.stdout.readline()
        process.send_signal(getattr(signal, name))
        code, said = finish(process)
        check(f"{name} ends it without a stack trace", code == 0 and "lines written" in said, said)
    once(out)
    check("what a signal left out is written later", events(out, "loss") == losses(1, 4), events(out, "loss"))
    process = start(out)
    add(out, lines_of(5, 8))
    wait_for(out, 8)
    process.kill()
    process.communicate()
    add(out, lines_of(9, 9))
    once(out)
    check("after it was killed, it goes on where it was", events(out, "loss") == losses(1, 9), events(out, "loss"))


def check_errors(out):
    code, said = once(out / "nowhere")
    check("a directory that is not there", code == 1 and said.startswith("error: ") and "no directory" in said, said)
    code, said = once(out)
    check("a directory without metrics.jsonl", code == 1 and "has no metrics.jsonl" in said, said)
    add(out, lines_of(1, 1))
    (out / "follow-mlflow.json").write_text("[]\n")
    code, said = once(out, "--to", "mlflow")
    check("a file of its own that is not what it writes", code == 1 and "remove it" in said, said)
    (out / "without").mkdir()
    (out / "without" / "wandb.py").write_text('raise ImportError("left out")\n')
    code, said = once(out, "--to", "wandb", PYTHONPATH=str(out / "without"))
    check("a package that is missing", code == 1 and "pip install wandb" in said, said)


def check_mlflow(out):
    uri = f"sqlite:///{out}/mlflow.db"
    add(out, lines_of(1, 4))
    code, said = once(out, "--to", "mlflow", MLFLOW_TRACKING_URI=uri)
    add(out, lines_of(5, 8))
    again, said = once(out, "--to", "mlflow", MLFLOW_TRACKING_URI=uri)
    from mlflow import MlflowClient

    run_id = json.loads((out / "follow-mlflow.json").read_text())["id"]
    history = {tag: MlflowClient(uri).get_metric_history(run_id, tag) for tag in ("loss", "val_loss")}
    found = {tag: sorted((m.step, m.value) for m in metrics) for tag, metrics in history.items()}
    holds = not code and not again and found == {"loss": losses(1, 8), "val_loss": validations(8)}
    check("MLflow: two starts of the script write one run", holds, said)


def check_wandb(out):
    environment = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    add(out, lines_of(1, 4))
    code, said = once(out, "--to", "wandb", **environment)
    run_id = json.loads((out / "follow-wandb.json").read_text())["id"]
    add(out, lines_of(5, 8))
    again, said = once(out, "--to", "wandb", **environment)
    runs = list(out.glob("wandb/offline-run-*"))
    holds = not code and not again and runs and all(run.name.endswith(run_id) for run in runs)
    check("Weights & Biases, offline: two starts of the script write one run", holds and " 5 lines" in said, said)


def check_program(out):
    tokens = b"LLM3TOK1" + struct.pack("<4IQ", 1, 2, 256, 0, 400) + bytes(32)
    (out / "bytes.tok").write_bytes(tokens + struct.pack("<400H", *(i * 37 % 256 for i in range(400))))
    run = out / "run"
    command = [PROGRAM, "--model", TOP / "dev" / "test" / "fixtures" / "base", "--data", out / "bytes.tok"]
    command += ["--val", out / "bytes.tok", "--seq", "8", "--batch", "1", "--steps", "6", "--val-every", "3"]
    done = subprocess.run([*command, "--threads", "1", "--out", run], capture_output=True, text=True, timeout=LIMIT)
    if done.returncode:
        check("a run of the program", False, done.stderr.strip())
        return
    (run / "run-data.js").rename(run / "later")
    process = start(run)
    wait_for(run, 6)
    (run / "later").rename(run / "run-data.js")
    code, said = finish(process)
    steps = [step for step, _ in events(run, "loss")], [step for step, _ in events(run, "val_loss")]
    check("a run of the program: each step, and its end", not code and steps[0] == [*range(1, 7)], said)
    check("the program's validations", steps[1] == sorted(set(steps[1])) and {3, 6} <= set(steps[1]), steps[1])


def main():
    checks = [check_once, check_odd_lines, check_following, check_signals, check_errors]
    for name, one in (("mlflow", check_mlflow), ("wandb", check_wandb)):
        if has(name):
            checks.append(one)
        else:
            print(f"left out: {name} is not installed")
    if PROGRAM.is_file():
        checks.append(check_program)
    else:
        print(f"left out: there is no {PROGRAM}")
    for one in checks:
        with tempfile.TemporaryDirectory() as folder:
            try:
                one(Path(folder))
            except (TimeoutError, subprocess.TimeoutExpired) as error:
                check(one.__name__, False, error)
    print(f"{counts['pass']} passed, {counts['FAIL']} failed")
    sys.exit(counts["FAIL"] > 0)


if __name__ == "__main__":
    main()
