"""program.py: runs the project's programs for the exercises, and builds them first if need be.

Nothing here knows an answer: plans come from plan_llama3, losses and weights from train_llama3, and schedules and
tensor tables from small C programs that include the project's headers.
"""
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = "dev/clusters/h100-8.json"
PLANNER = "build/cpu-bf16/plan_llama3"
TRAINER = "build/cpu-fp32/train_llama3"
WORK = os.environ.get("EXERCISES_DIR", "build/exercises")  # what exercises write; tests use a folder of their own


class Failure(Exception):
    """A program that the exercise needs did not do what it should; the message is what it printed."""


def run(command, seconds=300, **options):
    options.setdefault("cwd", ROOT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True, check=False,
                          **options)


def build(target, precision, *variables):
    """make TARGET. It says so on standard error if that takes a while, because a compiler is running."""
    make = os.environ.get("MAKE", "make")
    command = [make, "--no-print-directory", "-s", f"PRECISION={precision}", *variables, target]
    if not (ROOT / target).exists():
        print(f"building {target} …", file=sys.stderr, flush=True)
    done = run(command, seconds=900, close_fds=False)
    if done.returncode:
        raise Failure(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return ROOT / target


@lru_cache(maxsize=None)
def planner():
    return build(PLANNER, "bf16")


@lru_cache(maxsize=None)
def trainer():
    return build(TRAINER, "fp32")


def command_line(options):
    """What the reader can type to see the same."""
    return f"{PLANNER} {options}"


@lru_cache(maxsize=None)
def printed(options):
    """What plan_llama3 prints. Threads are fixed, because each needs some memory."""
    done = run([planner(), *options.split(), "--threads", "1"])
    if done.returncode:
        raise Failure(done.stderr.strip().removeprefix("error: "))
    return done.stdout


@lru_cache(maxsize=None)
def plan(options):
    """plan.json of these options, with "text" what was printed."""
    with tempfile.TemporaryDirectory() as out:
        text = printed(f"{options} --out {out}")
        return {**json.loads((Path(out) / "plan.json").read_text()), "text": text}


def traffic(plan_of_run, axis, op, rank=0):
    """Bytes that a rank receives per step in this collective."""
    ranks = next(c for c in plan_of_run["rank_classes"] if rank in c["ranks"])
    return sum(t["bytes"]["dry_run"] for t in ranks["traffic"] if t["axis"] == axis and t["op"] == op)


def estimate(options):
    return plan(f"{options} --cluster {CLUSTER}")["estimate"]


def peak_flops(precision):
    """FLOP/s of a device of the cluster, without sparsity."""
    return json.loads((ROOT / CLUSTER).read_text())["peak_flops_per_s"][precision]


@lru_cache(maxsize=None)
def compiled(source):
    """A small C program next to an exercise, which includes the project's headers."""
    program = ROOT / WORK / source.parent.name / source.stem
    program.parent.mkdir(parents=True, exist_ok=True)
    command = [os.environ.get("CC", "cc"), "-x", "c", "-std=c11", "-O1", "-w", "-iquote", str(ROOT), str(source), "-o",
               str(program), "-lcjson", "-lm", "-pthread"]
    done = run(command)
    if done.returncode:
        raise Failure(f"{' '.join(command)} failed:\n{done.stderr}")
    return program


def run_c(source, *arguments):
    """The numbers that a small C program prints."""
    done = run([compiled(source), *map(str, arguments)])
    if done.returncode:
        raise Failure(f"{source}: {done.stderr}")
    return [int(word) for word in done.stdout.split()]
