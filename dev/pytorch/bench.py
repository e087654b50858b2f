"""bench.py: training speed of PyTorch and of the C program, side by side on one CPU.

    python bench.py --compile --ours 'build/cpu-fp32/train_llama3' --ours 'build/cpu-bf16/train_llama3'

Each step is forward + backward + clip + AdamW on random tokens. Machines drift, so the contestants take turns,
--rounds times; the figure is the median over the steps of all rounds, after warm-up. PyTorch gets its best:
scaled_dot_product_attention, fused AdamW, and torch.compile where asked for. `--ours CMD` (repeatable) is called as
CMD --model M --data FILE --seq T --batch B --steps N --out DIR, on a file of random tokens; its speed is read from
metrics.jsonl. It may be a whole line: 'mpirun --bind-to none -np 2 build/cpu-fp32/train_llama3'.
"""
import argparse
import json
import re
import shlex
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

MODELS = {  # as in ../../README.md; both untied
    "bench-8m": dict(C=288, L=6, NH=6, NKV=6, FF=768, V=4096, T=256, B=8),
    "bench-125m": dict(C=768, L=12, NH=12, NKV=4, FF=2048, V=32000, T=512, B=2),
}


class Block(nn.Module):
    """Written for speed; reference.py is the one written to be read."""
    def __init__(self, C, NH, NKV, FF, **_):
        super().__init__()
        self.NH, self.NKV, self.HD = NH, NKV, C // NH
        self.norm1, self.norm2 = nn.RMSNorm(C, eps=1e-5), nn.RMSNorm(C, eps=1e-5)
        self.qkv = nn.Linear(C, (NH + 2 * NKV) * self.HD, bias=False)
        self.o = nn.Linear(C, C, bias=False)
        self.gate, self.up = nn.Linear(C, FF, bias=False), nn.Linear(C, FF, bias=False)
        self.down = nn.Linear(FF, C, bias=False)

    def rotate(self, x, cos, sin):                                       # (B, N, T, HD)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def forward(self, x, cos, sin):                                      # (B, T, C)
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, -1, self.HD).transpose(1, 2)
        q, k, v = qkv.split((self.NH, self.NKV, self.NKV), dim=1)        # (B, NH | NKV, T, HD)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.NH != self.NKV)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, C, L, V, T, NH, **rest):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, C), nn.Linear(C, V, bias=False)
        self.blocks = nn.ModuleList(Block(C=C, NH=NH, **rest) for _ in range(L))
        self.norm = nn.RMSNorm(C, eps=1e-5)
        HD = C // NH
        angle = torch.outer(torch.arange(T).float(), 500000.0 ** (-torch.arange(0, HD, 2).float() / HD))
        self.register_buffer("cos", angle.cos())                         # (T, HD/2)
        self.register_buffer("sin", angle.sin())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):                                     # (B, T) each -> mean loss
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class PyTorch:
    """One contestant: keeps its model between turns."""
    def __init__(self, m, bf16, compiled):
        torch.manual_seed(0)
        how = ("bf16 autocast" if bf16 else "fp32") + (", compiled" if compiled else ", eager")
        self.name = f"PyTorch {torch.__version__.split('+')[0]} {how}"
        self.m, self.bf16, self.model = m, bf16, Model(**m)
        self.call = torch.compile(self.model) if compiled else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
        self.cold = True

    def turn(self, steps, warmup):
        """Tokens per second of each of `steps` steps."""
        m, speeds = self.m, []
        for _ in range(steps + (warmup if self.cold else 1)):
            tokens = torch.randint(m["V"], (m["B"], m["T"] + 1))
            start = time.perf_counter()
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = self.call(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
            self.optimizer.step()
            speeds.append(m["B"] * m["T"] / (time.perf_counter() - start))
        self.cold = False
        return speeds[-steps:]


class Ours:
    """The C program: a process of its own each turn."""
    def __init__(self, name, m, command):
        self.name, self.command, self.vocab = f"`{command}`", shlex.split(command), m["V"]
        ranks = int((re.search(r"(?:-np|--ranks) (\d+)", command) or [0, 1])[1])  # the same samples a step, over all ranks
        self.options = f"--model {name} --seq {m['T']} --batch {m['B'] // ranks}"

    def turn(self, steps, warmup):
        with tempfile.TemporaryDirectory() as out:
            data, tokens = Path(out) / "random.tok", torch.randint(self.vocab, (200_000,), dtype=torch.int32).numpy()
            data.write_bytes(struct.pack("<8sIIIIQ32s", b"LLM3TOK1", 1, 4, self.vocab, 0, tokens.size, bytes(32)) + tokens.tobytes())
            command = self.command + self.options.split() + ["--data", str(data), "--steps", str(steps + warmup), "--out", out]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"error: {shlex.join(command)}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
            lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
        return [line["tokens_per_s"] for line in lines if "loss" in line][-steps:]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args.add_argument("--steps", type=int, default=5, help="measured steps a turn (5)")
    args.add_argument("--warmup", type=int, default=2, help="steps before the first measured one (2)")
    args.add_argument("--rounds", type=int, default=3, help="turns of each contestant (3)")
    args.add_argument("--threads", type=int, default=torch.get_num_threads())
    args.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    args.add_argument("--compile", action="store_true", help="also torch.compile (needs a C++ compiler)")
    args.add_argument("--ours", action="append", default=[], metavar="CMD", help="the C program; may be repeated")
    args = args.parse_args()
    torch.set_num_threads(args.threads)

    print("| model | program | tokens/s, median | slowest to fastest step |\n|---|---|---|---|", flush=True)
    for name in args.models:
        m = MODELS[name]
        contestants = [PyTorch(m, precision == "bf16", compiled)
                       for precision in args.precision for compiled in ([False, True] if args.compile else [False])]
        contestants += [Ours(name, m, command) for command in args.ours]
        speeds = {c.name: [] for c in contestants}
        for _ in range(args.rounds):
            for c in contestants:
                speeds[c.name] += c.turn(args.steps, args.warmup)
        for label, s in speeds.items():
            print(f"| {name} | {label} | {statistics.median(s):,.0f} | {min(s):,.0f} to {max(s):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
