"""bench.py: training speed of PyTorch and of the C program, side by side on one CPU.

    make PRECISION=fp32 && make PRECISION=bf16
    python dev/pytorch/bench.py --write                          # writes dev/results/cpu-<processor>.md
    python dev/pytorch/bench.py --models bench-8m --only fsdp2,ours --rounds 1

A step is forward + backward + clipping + AdamW on random tokens, the same number of them for every contestant. Because
machines drift, the contestants of a model and precision take turns, --rounds times, every other round in reverse order.
Speeds are medians over the steps of all rounds, ratios are medians of each round's ratio. Each PyTorch contestant runs
in processes of its own, so that none shares another's compile cache, and sleeps between its turns; the CPU time that it
uses while sleeping is measured and reported. --threads N (default: all cores) means one rank × N threads, or two
ranks × N/2 threads:

    eager, compiled         scaled_dot_product_attention, fused AdamW, autocast for bf16; torch.compile of the model
    fsdp2, fsdp2-compiled   fully_shard over gloo: embedding, blocks and head (which stays unsharded), as in torchtitan;
                            bf16 by MixedPrecisionPolicy, gradients reduced in fp32; torch.compile of blocks and head
    ours-1                  build/cpu-<precision>/train_llama3, one rank
    ours-threads, ours-mpi  FSDP on two ranks, as threads of a process and under mpirun

PyTorch runs as it is installed. --tune-malloc lets its processes keep freed memory during a turn, on huge pages
(glibc 2.35 or newer), as the program's arenas do; bench-8m becomes about a tenth faster. These were tried in addition
and were not faster (CPU time of a step of bench-8m bf16, within 2 %): embedding and head in the root's unit, block
inputs cast to bf16, sums instead of averages, torch.compile of the whole model under FSDP2, max-autotune (one
thread).

`--ours CMD` (repeatable) adds a contestant such as 'mpirun --bind-to none -np 2 build/cpu-bf16/train_llama3', run from
the repository's root; its path names its precision. The program's speed is read from metrics.jsonl.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import re
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parents[2]
MODELS = {  # the program's presets of these names; both untied
    "bench-8m": dict(C=288, L=6, NH=6, NKV=6, FF=768, V=4096, T=256, B=8),
    "bench-125m": dict(C=768, L=12, NH=12, NKV=4, FF=2048, V=32000, T=512, B=2),
}
MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
    ":glibc.malloc.top_pad=67108864"
)  # during a turn, freed memory is kept, on huge pages, as in the program's arenas
RATIOS = [  # label, numerator, the best of these as denominator
    ("1 rank / PyTorch compiled", "ours-1", ["compiled"]),
    ("1 rank / better of PyTorch eager and compiled", "ours-1", ["eager", "compiled"]),
    ("2 ranks, threads / 1 rank", "ours-threads", ["ours-1"]),
    ("2 ranks, mpi / 1 rank", "ours-mpi", ["ours-1"]),
    ("2 ranks, threads / PyTorch FSDP2", "ours-threads", ["fsdp2"]),
    ("2 ranks, mpi / PyTorch FSDP2", "ours-mpi", ["fsdp2"]),
    ("2 ranks, threads / better of FSDP2 and FSDP2 compiled", "ours-threads", ["fsdp2", "fsdp2-compiled"]),
    ("2 ranks, mpi / better of FSDP2 and FSDP2 compiled", "ours-mpi", ["fsdp2", "fsdp2-compiled"]),
    ("PyTorch FSDP2 / PyTorch eager", "fsdp2", ["eager"]),
]


class Block(nn.Module):
    """Written for speed; reference.py is the version written to be read."""

    def __init__(self, C, NH, NKV, FF, **_):
        super().__init__()
        self.NH, self.NKV, self.HD = NH, NKV, C // NH
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, (NH + 2 * NKV) * self.HD, bias=False)
        self.o = nn.Linear(C, C, bias=False)
        self.gate, self.up = nn.Linear(C, FF, bias=False), nn.Linear(C, FF, bias=False)
        self.down = nn.Linear(FF, C, bias=False)

    def rotate(self, x, cos, sin):  # (B, N, T, HD)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def forward(self, x, cos, sin):  # (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, -1, self.HD).transpose(1, 2)
        q, k, v = qkv.split((self.NH, self.NKV, self.NKV), dim=1)  # (B, NH | NKV, T, HD)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.NH != self.NKV)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Head(nn.Module):
    def __init__(self, C, V):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(C, eps=1e-5), nn.Linear(C, V, bias=False)

    def forward(self, x, targets):  # (B, T, C), (B, T) -> mean loss
        return F.cross_entropy(self.linear(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Model(nn.Module):
    def __init__(self, C, L, V, T, NH, **rest):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, C), Head(C, V)
        self.blocks = nn.ModuleList(Block(C=C, NH=NH, **rest) for _ in range(L))
        HD = C // NH
        angle = torch.outer(torch.arange(T).float(), 500000.0 ** (-torch.arange(0, HD, 2).float() / HD))
        self.register_buffer("cos", angle.cos())  # (T, HD/2)
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):  # (B, T) each -> mean loss
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(x, targets)


def shard(model, bf16, compiled):
    """FSDP2 over all ranks, with torchtitan's units. The embedding outputs bf16, so inputs need no cast (cos and sin
    stay fp32)."""
    if compiled:
        for part in (*model.blocks, model.head):
            part.compile(dynamic=False)
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        if bf16
        else MixedPrecisionPolicy()
    )
    for part in (model.embed, *model.blocks):
        fully_shard(part, mp_policy=policy)
    fully_shard(model.head, mp_policy=policy, reshard_after_forward=False)  # its backward comes first
    fully_shard(model, mp_policy=policy)


def worker(pipe, rank, ranks, threads, m, bf16, kind, meeting, tune_malloc):
    """One rank of a PyTorch contestant: for each number that it receives, it trains that many steps and sends their
    seconds."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batch, compiled = Model(**m), m["B"] // ranks, kind.endswith("compiled")
    if kind.startswith("fsdp2"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", f"file://{meeting}", timedelta(minutes=5), ranks, rank)
        shard(model, bf16, compiled)
    elif compiled:
        model.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    torch.manual_seed(rank)
    for steps in iter(pipe.recv, 0):
        seconds = []
        for _ in range(steps):
            tokens = torch.randint(m["V"], (batch, m["T"] + 1))
            start = time.perf_counter()
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16 and ranks == 1):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            seconds.append(time.perf_counter() - start)
        optimizer.zero_grad(set_to_none=True)
        del tokens, loss
        if tune_malloc:  # the memory is another's now; malloc as
            ctypes.CDLL(None).malloc_trim(0)  # installed faults more in later steps after this
        pipe.send(seconds)
    if dist.is_initialized():
        dist.destroy_process_group()


class PyTorch:
    """One contestant; its processes keep their model between turns."""

    def __init__(self, kind, m, precision, threads, tune_malloc):
        ranks = 2 if kind.startswith("fsdp2") else 1
        self.key, self.tokens = kind, m["B"] * m["T"]
        self.name = (
            "PyTorch "
            + {"eager": "eager", "compiled": "compiled", "fsdp2": "FSDP2", "fsdp2-compiled": "FSDP2, compiled"}[kind]
        )
        self.name += (
            f", {shape(ranks, threads)}" + (", gloo" if ranks > 1 else "") + (", malloc tuned" if tune_malloc else "")
        )
        self.folder = tempfile.TemporaryDirectory()
        context, self.pipes, self.processes = multiprocessing.get_context("spawn"), [], []
        if tune_malloc:
            os.environ["GLIBC_TUNABLES"] = MEMORY  # for the processes that start here
        for rank in range(ranks):
            here, there = context.Pipe()
            self.processes.append(
                context.Process(
                    target=worker,
                    daemon=True,
                    args=(
                        there,
                        rank,
                        ranks,
                        max(1, threads // ranks),
                        m,
                        precision == "bf16",
                        kind,
                        self.folder.name + "/meeting",
                        tune_malloc,
                    ),
                )
            )
            self.processes[-1].start()
            there.close()
            self.pipes.append(here)
        os.environ.pop("GLIBC_TUNABLES", None)

    def turn(self, steps, warmup):
        """Tokens per second of each of `steps` steps, over all ranks."""
        for pipe in self.pipes:
            pipe.send(steps + warmup)
        answers = [pipe.recv() for pipe in self.pipes]  # EOFError: a rank died
        return [self.tokens / max(seconds) for seconds in zip(*answers)][-steps:]

    def kill(self):
        for process in self.processes:
            process.terminate()

    def close(self):
        for pipe in self.pipes:
            pipe.send(0)
        for process in self.processes:
            process.join()
        self.folder.cleanup()


class Ours:
    """The C program; each turn is a process of its own."""

    processes = ()

    def __init__(self, key, name, model, command):
        m = MODELS[model]
        ranks = int(
            (re.search(r"(?:-np|-n|--ranks) (\d+)", command) or [0, 1])[1]
        )  # the same samples a step, over all ranks
        self.key, self.name, self.vocab = key, name, m["V"]
        self.command = shlex.split(command) + f"--model {model} --seq {m['T']} --batch {m['B'] // ranks}".split()
        self.environment = dict(os.environ)
        if os.getuid() == 0:  # Open MPI refuses root otherwise
            self.environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def turn(self, steps, warmup):
        with tempfile.TemporaryDirectory() as out:
            data, tokens = Path(out) / "random.tok", torch.randint(self.vocab, (200_000,), dtype=torch.int32).numpy()
            data.write_bytes(
                struct.pack("<8sIIIIQ32s", b"LLM3TOK1", 1, 4, self.vocab, 0, tokens.size, bytes(32)) + tokens.tobytes()
            )
            command = self.command + ["--data", str(data), "--steps", str(steps + warmup), "--out", out]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=self.environment)
            if done.returncode:
                sys.exit(f"error: {shlex.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
            lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
        return [line["tokens_per_s"] for line in lines if "loss" in line][-steps:]

    def close(self):
        pass


def shape(ranks, threads):
    each = max(1, threads // ranks)
    return f"{ranks} rank{'s' * (ranks > 1)} × {each} thread{'s' * (each > 1)}"


def line_up(args, model, precision):
    """The contestants of one model and precision that --only selects and that this machine can run."""
    chosen = lambda key: not args.only or key.startswith(tuple(args.only.split(",")))
    contestants = [
        PyTorch(kind, MODELS[model], precision, args.threads, args.tune_malloc)
        for kind in ("eager", "compiled", "fsdp2", "fsdp2-compiled")
        if chosen(kind)
    ]
    program, half = f"build/cpu-{precision}/train_llama3", max(1, args.threads // 2)
    if (ROOT / program).exists():
        for key, transport, ranks, command in (
            ("ours-1", "", 1, f"{program} --threads {args.threads}"),
            ("ours-threads", ", threads", 2, f"{program} --ranks 2 --threads {half}"),
            ("ours-mpi", ", mpi", 2, f"mpirun --bind-to none -np 2 {program} --threads {half}"),
        ):
            if chosen(key) and (key != "ours-mpi" or shutil.which("mpirun")):
                contestants.append(Ours(key, f"this program, {shape(ranks, args.threads)}{transport}", model, command))
    else:
        print(f"note: {program} is not there; make PRECISION={precision}", file=sys.stderr)
    return contestants + [Ours(f"`{c}`", f"`{c}`", model, c) for c in args.ours if precision in c]


def cpu_seconds(contestants):
    """CPU time used so far by the contestants' processes."""
    stats = [
        Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split() for c in contestants for p in c.processes
    ]
    return sum(int(s[11]) + int(s[12]) for s in stats) / os.sysconf("SC_CLK_TCK")


def compete(args, model, precision):
    """Returns {key: (name, [speeds of each round])}, and the CPU seconds per second that waiting contestants used."""
    contestants, waits = line_up(args, model, precision), [0]
    result = {c.key: (c.name, []) for c in contestants}
    for r in range(-1, args.rounds):  # -1: PyTorch starts, compiles, warms up
        for c in contestants[::-1] if r % 2 else contestants[:]:
            if r < 0 and not c.processes:
                continue
            others = [o for o in contestants if o is not c]
            before, start = cpu_seconds(others), time.perf_counter()
            try:
                speeds = c.turn(args.steps, 1 if c.processes else args.warmup) if r >= 0 else c.turn(args.warmup, 0)
            except EOFError:
                print(f"note: {c.name}, {precision}: ended with an error and is left out", file=sys.stderr)
                c.kill()
                contestants.remove(c)
                del result[c.key]
                continue
            if r >= 0:
                waits.append((cpu_seconds(others) - before) / (time.perf_counter() - start))
                result[c.key][1].append(speeds)
            print(
                f"{model} {precision}, round {r + 1}: {c.name}: {statistics.median(speeds):,.0f} tokens/s, "
                f"{time.perf_counter() - start:.0f} s",
                file=sys.stderr,
            )
    for c in contestants:
        c.close()
    return result, max(waits)


def ratio(result, mine, theirs):
    """Median, minimum and maximum over rounds of mine / the best of theirs."""
    if mine not in result or not all(key in result for key in theirs):
        return "–"
    medians = {key: [statistics.median(s) for s in result[key][1]] for key in (mine, *theirs)}
    ratios = [medians[mine][r] / max(medians[key][r] for key in theirs) for r in range(len(medians[mine]))]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def machine():
    """The processor's name, and a line about it and the commit."""
    info = dict(line.split(":", 1) for line in reversed(Path("/proc/cpuinfo").read_text().splitlines()) if ":" in line)
    info = {key.strip(): value.strip() for key, value in info.items()}
    name = " ".join(
        re.sub(
            r"\(R\)|\(TM\)|@.*|\bCPU\b|\bProcessor\b|\d+-Core", "", info.get("model name", platform.machine())
        ).split()
    )
    has = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in info.get("flags", "").split()]
    tree = subprocess.run(
        ["git", "describe", "--always", "--dirty= with changes", "--exclude", "*"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return name, (
        f"{name} ({', '.join(has)}), {len(os.sched_getaffinity(0))} cores; PyTorch {torch.__version__}, "
        f"Python {platform.python_version()}; tree of commit {tree.stdout.strip() or 'unknown'}."
    )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    args.add_argument("--only", metavar="NAMES", help="contestants whose names begin so, e.g. fsdp2,ours (all)")
    args.add_argument(
        "--ours", action="append", default=[], metavar="CMD", help="one more of the C program; may be repeated"
    )
    args.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="over all ranks (all cores)")
    args.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    args.add_argument("--steps", type=int, default=4, help="measured steps a turn (4)")
    args.add_argument("--warmup", type=int, default=2, help="steps of a new process that are not measured (2)")
    args.add_argument("--tune-malloc", action="store_true", help="PyTorch keeps freed memory, on huge pages")
    args.add_argument("--write", action="store_true", help="write dev/results/cpu-<processor>.md")
    args = args.parse_args()
    for command in args.ours:
        if not re.search("fp32|bf16", command):
            sys.exit(f"error: --ours '{command}': its path must name its precision, fp32 or bf16")

    if os.getloadavg()[0] > 0.5:
        print(
            f"note: a load average of {os.getloadavg()[0]:.1f}: other programs are running, and the figures suffer",
            file=sys.stderr,
        )
    name, described = machine()
    text = [
        f"# Training speed on {name} against PyTorch, in turns, one run\n",
        f"`python dev/pytorch/bench.py {shlex.join(sys.argv[1:])}`\n".replace(" `", "`"),
        described + " The docstring of `bench.py` lists the contestants and their settings.\n",
        "| model | precision | program | tokens/s, median | slowest to fastest step |\n|---|---|---|---|---|",
    ]
    print("\n".join(text), flush=True)
    results, waits = {}, 0
    for model in args.models:
        for precision in args.precision:
            results[model, precision], wait = compete(args, model, precision)
            waits = max(waits, wait)
            for label, rounds in results[model, precision].values():
                s = [speed for speeds in rounds for speed in speeds]
                text.append(
                    f"| {model} | {precision} | {label} | {statistics.median(s):,.0f} | {min(s):,.0f} to {max(s):,.0f} "
                    f"|"
                )
                print(text[-1], flush=True)

    columns = list(results)
    text.append(
        "\nRatios of speeds, the median of each round's ratio (least to greatest); `1 rank`, `2 ranks`: this program.\n"
        "\n| |" + "".join(f" {model} {precision} |" for model, precision in columns) + "\n|---|" + "---|" * len(columns)
    )
    text += [
        f"| {what} | " + " | ".join(ratio(results[column], mine, theirs) for column in columns) + " |"
        for what, mine, theirs in RATIOS
    ]
    text.append(
        f"\nPyTorch's processes took at most {100 * waits:.1f} % of a core, all together, while another had its turn."
    )
    print("\n".join(text[-len(RATIOS) - 2 :]))
    if args.write:
        path = ROOT / "dev/results" / f"cpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
        path.write_text("\n".join(text) + "\n")
        print(f"\nwritten to {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
