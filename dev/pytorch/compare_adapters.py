"""compare_adapters.py: LoRA on SmolLM2-135M-Instruct: adapters in PEFT and transformers, the int8 base.

    make PRECISION=fp32 all build/cpu-fp32/logits
    dev/data/smollm2.py data/smollm2
    TOKENIZER=data/smollm2/tokenizer.model VAL_FRACTION=0.01 dev/data/kjv.sh data/kjv-finetune
    python dev/pytorch/compare_adapters.py [--steps 100] [--out dev/results/adapters.md]

Needs torch, transformers and peft. On the King James text: 100 steps of LoRA with the base in fp32 and in int8, with
validation; the logits of the adapters loaded by PEFT, and of the merged model loaded by transformers, against the
programs' (fp32 build); steps per second of full fine-tuning and of LoRA, in turns. The package's weights were
quantized to 4 bits once. Ends with an error if a bound is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch
from compare_smollm2 import BUILD, TOP, Report, read_token_file, run, write_token_file
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

T, WINDOWS = 256, 4
EVAL, CONVERT = BUILD / "eval_llama3", BUILD / "convert_llama3"


def commit():
    return subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=TOP, capture_output=True, text=True
    ).stdout.strip()


def train(out, model, data, steps, *more):
    """Trains; returns the lines of the run's metrics."""
    run(
        BUILD / "train_llama3",
        "--model",
        model,
        "--data",
        data / "train.tok",
        "--seq",
        128,
        "--batch",
        2,
        "--ranks",
        2,
        "--steps",
        steps,
        "--warmup",
        5,
        "--lr",
        "5e-4",
        "--out",
        out,
        *more,
    )
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def largest(a, b):
    return float(numpy.abs(a - b).max())


def relative(a, b):
    return float(numpy.linalg.norm((a - b).astype(numpy.float64)) / numpy.linalg.norm(b.astype(numpy.float64)))


def compare_logits(report, scratch, model, adapters, ids):
    def ours(folder, *adapters):
        return numpy.frombuffer(run(BUILD / "logits", folder, scratch / "ids", T, *adapters), dtype="<f4").reshape(
            WINDOWS, T, -1
        )

    def theirs(loaded):
        with torch.no_grad():
            return torch.cat([loaded(window[None]).logits for window in ids]).numpy()

    (scratch / "ids").write_bytes(ids.numpy().astype("<i4").tobytes())
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, adapters).eval()
    mine, peft_logits = ours(model, adapters), theirs(peft)
    plain = theirs(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    without = largest(ours(model), plain)  # 30 blocks in fp32, with sums in another order
    report.add(
        f"logits of {WINDOWS} x {T} tokens, up to {numpy.abs(mine).max():.0f}, adapters as PEFT loads them: largest "
        f"difference {largest(mine, peft_logits):.1e} (without adapters {without:.1e}); relative",
        f"{relative(mine, peft_logits):.1e}",
        "<= 1e-5",
        relative(mine, peft_logits) <= 1e-5 and largest(mine, peft_logits) <= 2 * without,
    )
    merge = [CONVERT, "--model", model, "--adapters", adapters, "--merge"]
    run(*merge, "--export", scratch / "merged", "--ranks", 2)
    merged = theirs(AutoModelForCausalLM.from_pretrained(scratch / "merged", dtype=torch.float32).eval())
    report.add(
        f"the merged model as transformers loads it: largest difference {largest(mine, merged):.1e}; relative",
        f"{relative(mine, merged):.1e}",
        "<= 1e-5",
        relative(mine, merged) <= 1e-5 and largest(mine, merged) <= 2 * without,
    )
    # transformers' norms round to fp32, whatever the model's dtype is
    LlamaRMSNorm.forward = lambda norm, x: (
        norm.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon))
    )
    for name, torch32, in64 in (
        (
            "PEFT",
            peft_logits,
            PeftModel.from_pretrained(
                AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64), adapters
            ).double(),
        ),
        (
            "transformers with the merged model",
            merged,
            AutoModelForCausalLM.from_pretrained(scratch / "merged", dtype=torch.float64),
        ),
    ):
        true = theirs(in64.eval())
        own = largest(torch32, true)
        report.add(
            f"largest difference from {name} in fp64, from which its own fp32 differs by {own:.1e}",
            f"{largest(mine, true):.1e}",
            "<= 2 x its own",
            largest(mine, true) <= 2 * own,
        )
    report.add(
        "what adapters change: largest difference from the model without them",
        f"{largest(mine, plain):.2f}",
        ">= 1",
        largest(mine, plain) >= 1,
    )
    peft.save_pretrained(scratch / "saved")
    again = ours(model, scratch / "saved")
    report.add(
        "adapters as PEFT saves them, in the program: logits that differ",
        int((again != mine).sum()),
        0,
        (again == mine).all(),
    )


def compare_stored(report, scratch, model):
    """Compares the int8 files, dequantized in PyTorch as docs/guide/lora-and-int8.md says."""
    run(CONVERT, "--model", model, "--export", scratch / "int8", "--dtype", "int8", "--ranks", 2)
    run(CONVERT, "--model", scratch / "int8", "--export", scratch / "dequantized")
    stored, dequantized, whole = (
        load_file(folder / "model.safetensors") for folder in (scratch / "int8", scratch / "dequantized", model)
    )
    differ, worst, count = 0, 0.0, 0
    for name, weights in whole.items():
        w, steps = stored[name], 1
        if w.dtype == torch.int8:
            steps = stored[name + ".scale"].repeat_interleave(64)[: w.numel()].view(w.shape)
            w, count = w.float() * steps, count + 1
            worst = max(worst, float(((w - weights.float()).abs() / steps.clamp_min(1e-30)).max()))
        differ += not torch.equal(w, dequantized[name])
    report.add(
        f"files of --dtype int8: {count} tensors dequantized in PyTorch that differ from those of convert_llama3",
        differ,
        0,
        differ == 0 and count > 0,
    )
    report.add("a weight of theirs is off by, in steps of its block", f"{worst:.4f}", "<= 0.5001", worst <= 0.5001)


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--model", type=Path, default=TOP / "data" / "smollm2")
    args.add_argument("--data", type=Path, default=TOP / "data" / "kjv-finetune")
    args.add_argument("--steps", type=int, default=100)
    args.add_argument("--rounds", type=int, default=5, help="of the timing")
    args.add_argument("--out", type=Path)
    args = args.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as work:
        scratch = Path(work)
        vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
        first = read_token_file(args.data / "val.tok")[: WINDOWS * T + 1]
        write_token_file(scratch / "windows.tok", args.data, first.tolist(), vocabulary)
        ids = torch.tensor(first[:-1]).reshape(WINDOWS, T)
        losses = {
            base: json.loads(
                run(
                    EVAL,
                    "--model",
                    args.model,
                    "--eval",
                    scratch / "windows.tok",
                    "--seq",
                    T,
                    "--batch",
                    WINDOWS,
                    "--base",
                    base,
                ).splitlines()[-1]
            )["loss"]
            for base in ("fp32", "int8", "int8:all")
        }
        for base in ("int8", "int8:all"):
            off = abs(losses[base] - losses["fp32"])
            report.add(
                f"loss on {WINDOWS} x {T} tokens, {base}: {losses[base]:.5f}, fp32 {losses['fp32']:.5f}; difference",
                f"{off:.4f}",
                "<= 0.01",
                off <= 0.01,
            )

        lora, val = ("--lora-rank", 16), ("--val", args.data / "val.tok", "--val-batches", 20)
        final = {}
        for base in ("fp32", "int8"):
            lines = train(
                scratch / f"lora-{base}", args.model, args.data, args.steps, *lora, *val, "--base", base
            )
            final[base] = lines[-1]["val_loss"]
        before = json.loads(
            run(EVAL, "--model", args.model, "--eval", args.data / "val.tok", "--seq", 128, "--batch", 2).splitlines()[
                -1
            ]
        )["loss"]
        off = abs(final["int8"] - final["fp32"])
        report.add(
            f"validation loss after {args.steps} steps of LoRA ({before:.3f} before), int8 {final['int8']:.4f}, fp32 "
            f"{final['fp32']:.4f}; difference",
            f"{off:.4f}",
            "<= 0.02",
            off <= 0.02,
        )
        report.add(
            "validation loss gained by them", f"{before - final['int8']:.3f}", ">= 0.1", before - final["int8"] >= 0.1
        )
        compare_logits(report, scratch, args.model, scratch / "lora-int8" / "latest", ids)
        compare_stored(report, scratch, args.model)

        seconds = {"full fine-tuning": [], "LoRA, fp32": [], "LoRA, int8": []}
        for i in range(args.rounds):
            for name, more in (
                ("full fine-tuning", ()),
                ("LoRA, fp32", lora),
                ("LoRA, int8", (*lora, "--base", "int8")),
            ):
                lines = train(scratch / f"{name}{i}", args.model, args.data, 4, *more)
                seconds[name] += [line["seconds"] for line in lines if "loss" in line and line["step"] > 1]
        times = {name: statistics.median(s) for name, s in seconds.items()}
        full = times["full fine-tuning"]
        for name in ("LoRA, fp32", "LoRA, int8"):
            report.add(
                f"steps a second, {name}: {times[name]:.3f} s a step, full fine-tuning {full:.3f} s; ratio",
                f"{full / times[name]:.2f}",
                ">= 1.2",
                full / times[name] >= 1.2,
            )
    if args.out:
        cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
        with open(args.out, "w") as f:
            f.write(
                f"# Adapters on SmolLM2-135M-Instruct\n\n{cpu}; `python dev/pytorch/compare_adapters.py --steps "
                f"{args.steps}`; commit {commit()}; fp32 build, 2 ranks, rank-16 adapters on all seven matrices. "
                "The package's weights were quantized once, to 4 bits a number.\n\n| | measured | bound | met |\n"
                "|---|---|---|---|\n"
            )
            f.writelines(f"| {what} | {figure} | {bound} | {good} |\n" for what, figure, bound, good in report.rows)
    sys.exit(1 if report.wrong else 0)


if __name__ == "__main__":
    main()
