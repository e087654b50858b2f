"""sources.py: what figures are drawn from: plans, traces and runs that the programs make again for each drawing.

A Source runs commands in the repository's root, each at most once, and remembers which ones a figure used, so that they
can be written into the figure. With small=True figures may ask for smaller runs whose structure is the same.
"""

import json
import os
import shlex
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
WORK = Path("build/figures")  # relative to ROOT, so that the commands in the figures are the same everywhere
TRAIN = "build/cpu-fp32/train_llama3"
PLAN_FP32 = "build/cpu-fp32/plan_llama3"
PLAN = "build/cpu-bf16/plan_llama3"  # H100s compute in bf16
STAGES = "--simulate stages"  # plans one rank of each pipeline stage: enough for memory, FLOPs and traffic
H100 = "--transport nccl --cluster dev/clusters/h100-8.json"
LAYOUT_405B = (
    "--model llama3.1-405b --world 16384 --tp 8 --pp 16 --dp-shard 128 --seq 8192 --batch 1 --accum 16 "
    "--sharding shard_grad_op --accumulate local --pp-schedule interleaved --pp-chunks 8 --pp-light-ends"
)
TOKENS = WORK / "text.tok"
TOKENS_COMMAND = f"python3 dev/course/figures/sources.py {TOKENS}"


def write_tokens(path):
    """A token file whose tokens are the bytes of the guide, so that figures need neither a tokenizer nor a download."""
    text = b"".join(p.read_bytes() for p in sorted((ROOT / "docs/guide").glob("*.md")))
    head = b"LLM3TOK1" + struct.pack("<IIIIQ", 1, 2, 4096, 0, len(text)) + bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head + b"".join(struct.pack("<H", byte) for byte in text))


class Source:
    def __init__(self, small=False):
        self.small = small
        self.outputs = {}  # command -> its standard output
        self.used = []  # commands of the figure that is being drawn
        (ROOT / WORK).mkdir(parents=True, exist_ok=True)

    def run(self, command):
        """Runs a command and returns its standard output."""
        if command not in self.used:
            self.used.append(command)
        if command in self.outputs:
            return self.outputs[command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            sys.exit(f"error: this command failed with code {done.returncode}: {command}\n{said[-1] if said else ''}")
        self.outputs[command] = done.stdout
        return done.stdout

    def tokens(self):
        if TOKENS_COMMAND not in self.used:
            self.used.append(TOKENS_COMMAND)
        if TOKENS_COMMAND not in self.outputs:
            write_tokens(ROOT / TOKENS)
            self.outputs[TOKENS_COMMAND] = ""
        return TOKENS

    def fresh(self, command, *outputs):
        """Runs a command after removing its outputs of an earlier time, which the programs would not replace."""
        if command not in self.outputs:
            subprocess.run(["rm", "-rf", *(str(ROOT / path) for path in outputs)], check=True)
        return self.run(command)

    def trace(self, name, options, program=TRAIN, with_out=False):
        """The timeline of a run or of a plan. `with_out`: its other files are in out(name)."""
        path = WORK / f"{name}.json"
        data = f"--data {self.tokens()} " if program == TRAIN else ""
        out = f" --out {self.out(name)}" if with_out else ""
        self.fresh(f"{program} {data}{options} --trace {path}{out}", path, self.out(name))
        return Trace(json.loads((ROOT / path).read_text(encoding="utf-8"))["traceEvents"])

    def out(self, name):
        return WORK / name

    def train(self, name, options):
        """Trains, and returns the folder of --out."""
        self.fresh(f"{TRAIN} --data {self.tokens()} {options} --out {self.out(name)}", self.out(name))
        return ROOT / self.out(name)

    def plan(self, name, options):
        """plan.json of a layout."""
        self.fresh(f"{PLAN} {options} --out {self.out(name)}", self.out(name))
        return json.loads((ROOT / self.out(name) / "plan.json").read_text(encoding="utf-8"))


class Trace:
    """A timeline, with times in ms."""

    def __init__(self, events):
        self.lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.counters = [{**e, "ts": e["ts"] / 1000} for e in events if e["ph"] == "C"]
        self.events = [{**e, "ts": e["ts"] / 1000, "dur": e["dur"] / 1000} for e in events if e["ph"] == "X"]
        self.ranks = sorted({e["pid"] for e in self.events})

    def axis(self, event):
        """The axis of a collective: fsdp, tp, …"""
        return self.lanes[event["pid"], event["tid"]].split()[0]

    def shortest_step(self, first=2):
        """The number of the step that took the least time, not counting those before `first`."""
        took = {}
        for e in self.events:
            if e["cat"] == "step":
                step = int(e["args"]["step"])
                took[step] = max(took.get(step, 0), e["dur"])
        return min((s for s in took if s >= min(first, max(took))), key=lambda s: took[s])

    def step(self, number=None, categories=("phase", "wait", "communication")):
        """The events of each rank in a step, in the order of their starts, `at` ms after the first rank's start, and
        the length of the step in ms."""
        if number is None:
            number = self.shortest_step()
        steps = {e["pid"]: e for e in self.events if e["cat"] == "step" and int(e["args"]["step"]) == number}
        if not steps:
            sys.exit(f"error: the trace has no step {number}")
        zero = min(e["ts"] for e in steps.values())
        ranks = {rank: [] for rank in steps}
        for e in self.events:
            whole = steps.get(e["pid"])
            if whole is None or e["cat"] not in categories or e["ts"] < whole["ts"] - 1e-3:
                continue
            if e["ts"] + e["dur"] <= whole["ts"] + whole["dur"] + 1e-3:
                ranks[e["pid"]].append({**e, "at": e["ts"] - zero, "ms": e["dur"]})
        length = max(e["ts"] + e["dur"] - zero for e in steps.values())
        return ranks, length

    def memory(self, rank, number):
        """The values of a rank's counters of memory during a step: (ms after its start, name, bytes) in order."""
        whole = next(
            e for e in self.events if e["cat"] == "step" and e["pid"] == rank and int(e["args"]["step"]) == number
        )
        begin, end = whole["ts"], whole["ts"] + whole["dur"]
        return [
            (c["ts"] - begin, c["name"].removeprefix("memory: "), c["args"]["bytes"])
            for c in self.counters
            if c["pid"] == rank and begin <= c["ts"] <= end
        ]


def short(name):
    """'model.layers.3' -> '3', 'embedding' -> 'embed'"""
    return name.removeprefix("model.layers.").replace("embedding", "embed")


def order(events):
    """Names of events, the structure of a lane: equal neighbors are counted."""
    names = []
    for e in events:
        if names and names[-1][0] == e["name"]:
            names[-1][1] += 1
        else:
            names.append([e["name"], 1])
    return [name if count == 1 else f"{count} x {name}" for name, count in names]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: expected the path of a token file to write")
    write_tokens(Path(sys.argv[1]))
