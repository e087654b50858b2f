"""bench_gpu.py: a training step and attention of the CUDA build and of PyTorch, in turns on one GPU.

    make CUDA=1 cuda-programs
    python dev/pytorch/bench_gpu.py --out training-gpu.md      # dev/gpu_check.sh: stages attention and training

A step is forward + backward of --accum micro-batches, clipping and AdamW on random tokens, measured to the end of its
last kernel. The C program is a child process that keeps its model on the GPU and runs steps on request
(build/cuda-bf16/bench_gpu); PyTorch's model stays in this process. They take turns of a few steps, so that clocks and
temperature are the same for both. If both do not fit into memory, each has the GPU to itself, twice.

PyTorch has parameters, gradients and AdamW in fp32, bf16 autocast, a residual stream in bf16 (fast_llama.py), fused
AdamW and foreach clipping. `compiled` is torch.compile of the whole model; `default` is the attention that PyTorch
chooses, `flash` its flash backend (the profiler says which kernels ran); `pure bf16` also has parameters and AdamW in
bf16, which trains differently.

--device cpu --tiny executes every line without a GPU; its times mean nothing. Without PyTorch, only the C program is
measured.
"""

import argparse
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from fast_llama import Llama
except ImportError as missing:
    if missing.name != "torch":
        raise
    torch = None

ROOT = Path(__file__).resolve().parents[2]
KINDS = {
    "compiled": ("default",),
    "eager": ("default", "flash"),
    "compiled, pure bf16": ("default",),
}  # most important first, because the time may run out
MODELS = {
    "1B": dict(
        title="Llama-3.2-1B",
        V=128256,
        C=2048,
        L=16,
        few=16,
        NH=32,
        NKV=8,
        HD=64,
        FF=8192,
        tied=True,
        T=8192,
        batch=1,
        accum=4,
        apart=False,
        kinds=KINDS,
    ),
    "8B": dict(
        title="{L} blocks of Llama-3-8B's shape",
        V=128256,
        C=4096,
        L=16,
        few=6,
        NH=32,
        NKV=8,
        HD=128,
        FF=14336,
        tied=False,
        T=8192,
        batch=1,
        accum=4,
        apart=True,
        kinds={"compiled": ("default",)},
    ),
    "tiny": dict(
        title="A tiny model",
        V=300,
        C=64,
        L=2,
        few=2,
        NH=2,
        NKV=1,
        HD=64,
        FF=96,
        tied=False,
        T=40,
        batch=1,
        accum=2,
        apart=False,
        kinds=KINDS,
    ),
    "tiny-apart": dict(
        title="{L} blocks of another",
        V=300,
        C=64,
        L=2,
        few=1,
        NH=2,
        NKV=1,
        HD=64,
        FF=96,
        tied=True,
        T=40,
        batch=1,
        accum=2,
        apart=True,
        kinds={"compiled": ("default",)},
    ),
}
# the same step as one micro-batch; this program and PyTorch do not fit at once
for name in "1B", "tiny":
    m = MODELS[name]
    MODELS[f"{name}-batch-4"] = dict(
        m, title=m["title"] + ", one micro-batch of 4", batch=4, accum=1, apart=True, kinds={"compiled": ("default",)}
    )
BEFORE = {
    "block matmuls": 265.8,
    "head matmuls": 67.1,
    "cross-entropy": 8.4,
    "attention": 143.5,
    "memory-bound ops": 31.3,
    "AdamW and norm": 11.9,
}  # ms, 1B on an H200 at commit 33d6e20
BOUNDS = {("compiled", "default"): 1.15}
started = time.monotonic()


# ---------------------------------------------------------------- PyTorch


def backend(name):
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if name == "flash" else nullcontext()


class Theirs:
    """PyTorch's model and optimizer; `kind` and `attention` say how it is run."""

    def __init__(self, m, device, pure):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Llama(m)
        if pure:
            for p in self.model.parameters():  # cos and sin stay fp32
                p.data = p.data.to(torch.bfloat16)
        self.m, self.device, self.pure, self.forward = m, device, pure, None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def choose(self, kind, attention):
        torch._dynamo.reset()  # the attention backend is chosen when the model is traced
        self.attention, self.forward = attention, self.model
        if kind.startswith("compiled"):
            self.forward = torch.compile(
                self.model, dynamic=False, fullgraph=True, backend="inductor" if self.device == "cuda" else "aot_eager"
            )

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()

    def close(self):
        del self.model, self.optimizer, self.forward
        torch._dynamo.reset()
        gc.collect()  # compiled models contain reference cycles
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def step(self):
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.m["accum"]):
            tokens = torch.randint(self.m["V"], (self.m["batch"], self.m["T"] + 1), device=self.device)
            with backend(self.attention), torch.autocast(self.device, torch.bfloat16, enabled=not self.pure):
                loss = self.forward(tokens[:, :-1], tokens[:, 1:])
            (loss / self.m["accum"]).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return loss

    def steps(self, count):
        """Milliseconds of each step, and the last loss."""
        ms = []
        for _ in range(count):
            self.wait()
            start = time.perf_counter()
            loss = self.step()
            self.wait()
            ms.append(1e3 * (time.perf_counter() - start))
        return ms, loss.item()

    def attention_kernels(self):
        """The two attention kernels that took longest, according to the profiler."""
        on = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (self.device == "cuda")
        try:
            with torch.profiler.profile(activities=on) as profile:
                self.step()
                self.wait()
            cost = lambda e: getattr(e, "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total", 0)
            rows = [
                e
                for e in profile.key_averages()
                if cost(e) > 0 and re.search("flash|fmha|cudnn|sdpa|attention", e.key, re.I)
            ]
            return (
                ", ".join(
                    dict.fromkeys(
                        re.sub(r"^void |[<(].*", "", e.key)[:60] for e in sorted(rows, key=cost, reverse=True)[:2]
                    )
                )
                or "none found"
            )
        except RuntimeError as error:  # some machines do not permit profiling
            return f"not known ({str(error).splitlines()[0][:60]})"


# ---------------------------------------------------------------- the C program


class Ours:
    """A child process; ask() sends it a line and reads the JSON object that answers. It may be closed while PyTorch
    has the GPU."""

    def __init__(self, args, what):
        environment = dict(os.environ, **({"LD_LIBRARY_PATH": args.library_path} if args.library_path else {}))
        self.child = subprocess.Popen(
            [args.program, *what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )

    def answer(self):
        for line in self.child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"error: {' '.join(self.child.args)} ended with {self.child.wait()} before it answered")

    def ask(self, line):
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return self.answer()

    def close(self):
        self.child.stdin.close()
        if self.child.wait():
            sys.exit(f"error: {' '.join(self.child.args)} ended with {self.child.returncode}")


class Report:
    """Markdown under one heading of --out, written to disk after each line; text under other headings, written by
    other calls, is kept. Bounds and JSON objects are also printed, for gpu_check.sh to collect."""

    def __init__(self, args, heading):
        self.path, self.heading, self.text = args.out, heading, []
        there = self.path.read_text() if self.path and self.path.exists() else ""
        self.before = re.sub(rf"(?ms)^## {re.escape(heading)}\n.*?(?=^## |\Z)", "", there).strip()
        self.say(f"## {heading}\n")

    def say(self, line):
        self.text.append(line)
        print(line, flush=True)
        if self.path:
            self.path.write_text("\n\n".join(filter(None, [self.before, "\n".join(self.text)])) + "\n")

    def bound(self, name, limit, value, most=False):
        met = value <= limit if most else value >= limit
        print(
            f"bound: {name} | {'<=' if most else '>='} {limit:g} | {value:.3f} | {'met' if met else 'MISSED'}",
            flush=True,
        )

    def speeds(self):
        self.say(
            "\n| program | ms a step, median | least to most | tokens/s | this program's speed / its | |\n"
            "|---|---:|---:|---:|---:|---|"
        )

    def speed(self, name, m, ms, mine=None, note=""):
        median = statistics.median(ms)
        ratio = median / statistics.median(mine or ms)
        tokens = 1e3 * m["T"] * m["batch"] * m["accum"] / median
        self.say(
            f"| {name} | {median:,.1f} | {min(ms):,.1f} to {max(ms):,.1f} | {tokens:,.0f} | "
            f"{f'{ratio:.3f}' if mine else ''} | {note} |"
        )
        print(
            json.dumps(
                dict(
                    section="training",
                    model=self.heading,
                    program=name,
                    ms=[round(x, 3) for x in ms],
                    tokens_per_s=round(tokens, 1),
                    ratio=round(ratio, 4),
                )
            )
        )


# ---------------------------------------------------------------- a training step


def start_ours(args, m, folder):
    """Starts the child and runs its first steps, which compare expected, dry-run and measured traffic."""
    config = dict(
        model_type="llama",
        hidden_size=m["C"],
        num_hidden_layers=m["L"],
        num_attention_heads=m["NH"],
        num_key_value_heads=m["NKV"],
        head_dim=m["HD"],
        intermediate_size=m["FF"],
        vocab_size=m["V"],
        max_position_embeddings=8192,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=m["tied"],
    )
    Path(folder, "config.json").write_text(json.dumps(config))
    shape = ["--seq", str(m["T"]), "--batch", str(m["batch"]), "--accum", str(m["accum"])]
    ours = Ours(args, ["train", "--model", folder, *shape])
    ours.answer()
    ours.ask("steps 2")
    return ours


def describe_ours(report, ours, before):
    memory, answer = ours.ask("memory"), ours.ask("parts")
    parts = answer["parts"]
    report.say(
        f"\nMemory: planned {memory['planned'] / 1e9:.2f} GB (all arenas; cuBLASLt's workspace is one), taken "
        f"{memory['taken'] / 1e9:.2f} GB."
    )
    report.bound(
        f"{report.heading}: device memory beyond the plan, MiB",
        64,
        (memory["taken"] - memory["planned"]) / 2**20,
        most=True,
    )
    parts["attention"] = parts["attention forward"] + parts["attention backward"]
    report.say("\n| part of a step | ms | on an H200 at commit 33d6e20, ms |\n|---|---:|---:|")
    for name in (*list(BEFORE), "attention forward", "attention backward"):
        report.say(f"| {name} | {parts[name]:.1f} | {before.get(name, '')} |")
    report.say(
        f"| all; the step by the host's clock | {answer['sum']:.1f}; {answer['step']:.1f} | "
        f"{round(sum(before.values()), 1) or ''} |"
    )
    print(json.dumps(dict(section="parts", model=report.heading, **answer)))


def out_of_time(args, seconds, report, what):
    left = args.limit - (time.monotonic() - started)
    if left < seconds:
        report.say(f"\n{what}: left out, {left:.0f} s were left.\n")
    return left < seconds


def measure(report, args, theirs, kind, attention, ours, mine):
    """Milliseconds of PyTorch, and of ours in turns with it. If ours is not resident, its milliseconds are those of
    its last turn."""
    begun = time.monotonic()
    theirs.choose(kind, attention)
    if theirs.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    loss = theirs.steps(2)[1]
    kernels, begun, ms, own = theirs.attention_kernels(), time.monotonic() - begun, [], [] if ours else mine
    for r in range(args.rounds):
        for who in ("ours", "theirs") if r % 2 else ("theirs", "ours"):
            if who == "theirs":
                ms += theirs.steps(args.steps)[0]
            elif ours:
                own += ours.ask(f"steps {args.steps}")["ms"]
    peak = torch.cuda.max_memory_allocated() / 1e9 if theirs.device == "cuda" else 0
    report.speed(
        f"PyTorch {kind}, {attention}",
        theirs.m,
        ms,
        own,
        f"{kernels}; loss {loss:.3f}; {peak:.0f} GB; first steps {begun:.0f} s",
    )
    return ms, own


def train(args, name):
    m = dict(MODELS[name])
    room = torch.cuda.get_device_properties(0).total_memory if torch and args.device == "cuda" else 0
    apart = m["apart"] or 0 < room < 100e9
    if 0 < room < 120e9:  # fp32 state plus what a step needs: 16 blocks in 141 GB
        m["L"] = min(m["L"], m["few"])
    report, times = Report(args, m["title"].format(**m)), {}
    report.say(
        f"{m['T'] * m['batch'] * m['accum']:,} tokens a step, in micro-batches of {m['batch']} x {m['T']:,}; "
        + (f"PyTorch {torch.__version__}" if torch else "no PyTorch here: this program alone")
        + (
            "; both do not fit at once: one after the other has the GPU, twice."
            if apart
            else "; both on the GPU, in turns."
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(2 if apart and torch else 1):
            if out_of_time(args, 60 * (args.device == "cuda"), report, "A turn"):
                break
            ours = start_ours(args, m, folder)
            if not turn:
                loss = ours.ask("steps 1")["loss"]
                describe_ours(report, ours, BEFORE if name == "1B" else {})
            report.speeds()
            mine = ours.ask(f"steps {args.steps * args.rounds}")["ms"]
            report.speed("this program", m, mine, note=f"loss {loss:.3f}")
            if apart:
                ours.close()
            for pure in (False, True) if torch else ():
                kinds = [
                    (k, a)
                    for k in m["kinds"]
                    for a in m["kinds"][k]
                    if k.endswith("pure bf16") == pure and not (turn and k != "compiled")
                ]
                theirs = Theirs(m, args.device, pure) if kinds else None
                for kind, attention in kinds:
                    if out_of_time(
                        args,
                        (70 if kind.startswith("compiled") else 20) * (args.device == "cuda"),
                        report,
                        f"PyTorch {kind}, {attention}",
                    ):
                        continue
                    try:
                        ms, own = measure(report, args, theirs, kind, attention, None if apart else ours, mine)
                        both = times.setdefault((kind, attention), ([], []))
                        both[0].extend(ms), both[1].extend(own)
                        if (kind, attention) in BOUNDS:  # reported immediately, and again after a second turn
                            report.bound(
                                f"{report.heading}: speed / PyTorch {kind}, {attention}",
                                BOUNDS[kind, attention],
                                statistics.median(both[0]) / statistics.median(both[1]),
                            )
                    except torch.OutOfMemoryError as error:
                        report.say(
                            f"\nPyTorch {kind}, {attention}: out of memory ({str(error).splitlines()[0][:100]})\n"
                        )
                if theirs:
                    theirs.close()
            if not apart:
                ours.close()


# ---------------------------------------------------------------- attention alone


def torch_attention(m, device, HD, name, calls):
    """Milliseconds of forward and of backward, call by call, on tensors in the model's layout; on a GPU all calls are
    enqueued at once."""
    qkv = torch.randn(1, m["T"], (m["NH"] + 2 * m["NKV"]) * HD, device=device, dtype=torch.bfloat16).view(
        1, m["T"], -1, HD
    )
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv.split((m["NH"], m["NKV"], m["NKV"]), dim=2))
    dout = torch.randn(1, m["T"], m["NH"], HD, device=device, dtype=torch.bfloat16).transpose(1, 2)
    marks = []

    def mark():
        marks.append(torch.cuda.Event(enable_timing=True) if device == "cuda" else time.perf_counter())
        if device == "cuda":
            marks[-1].record()

    for _ in range(3 + calls):  # three warm-up calls
        mark()
        with backend(name):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mark()
        torch.autograd.grad(y, (q, k, v), dout)
        mark()
    if device == "cuda":
        torch.cuda.synchronize()
    took = [a.elapsed_time(b) if device == "cuda" else 1e3 * (b - a) for a, b in zip(marks, marks[1:])]
    return {"forward": took[9::3], "backward": took[10::3]}


def attention(args):
    m, bounds = MODELS["tiny" if args.tiny else "1B"], []
    report = Report(args, "Attention against PyTorch's")
    report.say(
        f"One sequence of {m['T']:,} tokens, {m['NH']} heads over {m['NKV']}, causal counted half, backward 2.5 x "
        f"forward; medians of {args.rounds} turns of {args.steps} calls each.\n"
    )
    report.say(
        "| | this program, ms | TFLOP/s | PyTorch, ms | TFLOP/s | this program's speed / its |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    ours = Ours(args, ["attention", *["tiny"] * args.tiny])
    for HD, name in [(HD, name) for HD in (64, 128) for name in ("flash", "default")] if torch else ():
        mine, theirs = {"forward": [], "backward": []}, {"forward": [], "backward": []}
        for _ in range(args.rounds):
            answer, other = ours.ask(f"{HD} {args.steps}"), torch_attention(m, args.device, HD, name, args.steps)
            for way in mine:
                mine[way] += answer[way]
                theirs[way] += other[way]
        for way, factor in (("forward", 1), ("backward", 2.5)):
            a, b, tera = (
                statistics.median(mine[way]),
                statistics.median(theirs[way]),
                factor * answer["forward_flops"] / 1e9,
            )  # FLOPs over ms
            report.say(
                f"| heads of {HD}, {way}, PyTorch's {name} | {a:.3f} | {tera / a:.0f} | {b:.3f} | {tera / b:.0f} | "
                f"{b / a:.3f} |"
            )
            print(
                json.dumps(
                    dict(section="attention", HD=HD, way=way, backend=name, ms=a, theirs_ms=b, ratio=round(b / a, 4))
                )
            )
            if name == "default":
                bounds.append((f"attention {way}, heads of {HD}: speed / PyTorch's default", 0.97, b / a))
    ours.close()
    for bound in bounds:
        report.bound(*bound)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("what", nargs="*", help="attention, 1B, 1B-batch-4, 8B, in this order (all)")
    args.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    args.add_argument("--tiny", action="store_true", help="small shapes: to see that every line runs")
    args.add_argument("--program", type=Path, default=ROOT / "build/cuda-bf16/bench_gpu")
    args.add_argument("--library-path", help="the C program's LD_LIBRARY_PATH; PyTorch keeps its own libraries")
    args.add_argument("--rounds", type=int, default=3, help="turns of each (3)")
    args.add_argument("--steps", type=int, default=4, help="measured steps, or calls of attention, a turn (4)")
    args.add_argument("--limit", type=float, default=520, help="seconds in which no more is begun than fits (520)")
    args.add_argument("--out", type=Path, help="Markdown; headings that this call does not measure stay")
    args = args.parse_args()
    args.program = args.program.resolve()
    for what in args.what or ["attention", "1B", "1B-batch-4", "8B"]:
        if what == "attention":
            attention(args)
        elif what in MODELS:
            train(args, what.replace("1B", "tiny").replace("8B", "tiny-apart") if args.tiny else what)
        else:
            sys.exit(f"error: {what}: expected attention, {', '.join(MODELS)}")


if __name__ == "__main__":
    main()
