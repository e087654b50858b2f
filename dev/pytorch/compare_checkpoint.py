"""compare_checkpoint.py: the program's checkpoints in transformers, and transformers' models in the program.

    python dev/pytorch/compare_checkpoint.py [--out dev/results/checkpoints-transformers.md]

Needs torch, transformers and safetensors, and builds the programs in fp32. train_llama3 trains small models that
transformers initialized, on 2 ranks. Each checkpoint directory is loaded by from_pretrained as it is, and so is its
export in bf16: no key may be missing or unexpected, and the loss must equal that of eval_llama3. The same steps in
torch, on the samples that the run recorded, give AdamW's moments. Then eval_llama3 reads models written by
save_pretrained, in three dtypes, in one file and in several. Ends with an error if a bound is missed.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
import compare_tokenizer
import numpy
import torch
from compare_smollm2 import BUILD, TOP, Report, read_token_file, run, write_token_file
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

T, WINDOWS, VOCABULARY = 96, 8, 600
SPLIT = TOP / "build" / "split-fp32"  # a build whose programs write files of at most 1 MB
STEPS, BATCH, RANKS, LR, EPS = (
    12,
    2,
    2,
    3e-3,
    1e-5,
)  # with an epsilon of 1e-8, the last bits of tiny gradients would decide: torch's own fp32 and fp64 differ by 1e-3
BOUND, MOMENT_BOUND = 1e-5, 1e-4  # of a loss; of a moment's norm
NOTICED = 1e-3  # of a loss: how much it must change if a setting were lost
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}


def drawn(**settings):
    """A small random model, with weights large enough that attention is far from uniform."""
    config = LlamaConfig(
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=352,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.1,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    return LlamaForCausalLM(config)


def theirs(model, windows):
    """The loss of a transformers model, in fp32."""
    with torch.no_grad():
        logits = model.float().eval()(windows[:, :-1]).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def ours(folder, text):
    command = [BUILD / "eval_llama3", "--model", folder, "--eval", text / "few.tok", "--seq", T, "--batch", WINDOWS]
    return json.loads(run(*command).splitlines()[-1])["loss"]


def add_loss(report, what, a, b):
    report.add(
        f"{what}: eval_llama3 {a:.7f}, transformers {b:.7f}; relative difference",
        f"{abs(a - b) / b:.1e}",
        f"<= {BOUND:.0e}",
        abs(a - b) <= BOUND * b,
    )


def tokens(path):
    return torch.from_numpy(read_token_file(path))


def windows_of(ids, indices):
    return torch.stack([ids[i * T : i * T + T + 1] for i in indices])


def load(folder):
    """Loads a directory as it is; returns the model, and what from_pretrained complains about."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    return model, {what: sorted(names) for what, names in told.items() if names}


def compare_moments(report, name, start, run_folder, checkpoint, text):
    """Runs torch's AdamW in double precision on the same samples, and compares the moments of every tensor."""
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float64).train()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=EPS,
    )
    ids = tokens(text / "train.tok")
    steps = [json.loads(line) for line in (run_folder / "samples.jsonl").read_text().splitlines()]
    for step in (s for s in steps if "samples" in s):
        windows = windows_of(ids, step["samples"])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(
            model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten()
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    found = {}
    for file in sorted(checkpoint.glob("optimizer*.safetensors")):
        with safe_open(file, "pt") as f:
            found |= {key: f.get_tensor(key) for key in f.keys()}
    parameters = dict(model.named_parameters())
    expected = {f"{n}.{moment}" for n in parameters for moment in ("exp_avg", "exp_avg_sq")}
    report.add(
        f"{name}: names in optimizer*.safetensors, all parameters' exp_avg and exp_avg_sq",
        f"{len(found)}, {len(set(found) ^ expected)} others",
        f"{len(expected)}, 0 others",
        set(found) == expected,
    )
    for moment in ("exp_avg", "exp_avg_sq"):
        worst = max(
            ((found[f"{n}.{moment}"] - optimizer.state[p][moment]).norm() / optimizer.state[p][moment].norm()).item()
            for n, p in parameters.items()
        )
        report.add(
            f"{name}: {moment} after {STEPS} steps against torch.optim.AdamW's, worst tensor, relative to its norm",
            f"{worst:.1e}",
            f"<= {MOMENT_BOUND:.0e}",
            worst <= MOMENT_BOUND,
        )


def compare_export(report, name, build, checkpoint, folder, text, windows):
    run(build / "convert_llama3", "--model", checkpoint, "--export", folder, "--dtype", "bf16")
    files = sorted(f.name for f in folder.iterdir())
    weights = [f for f in files if f.startswith("model") and f.endswith(".safetensors")]
    wanted = sorted(
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", *weights]
        + (["model.safetensors.index.json"] if len(weights) > 1 else [])
    )
    report.add(
        f"{name}: files of convert_llama3 --dtype bf16",
        " ".join(files),
        "weights, config.json, generation_config.json, tokenizer.json, tokenizer_config.json",
        bool(weights) and files == wanted,
    )
    model, complaints = load(folder)
    report.add(f"{name}: the export in from_pretrained, complaints", complaints or "none", "none", not complaints)
    report.add(f"{name}: the export's dtype", model.dtype, torch.bfloat16, model.dtype == torch.bfloat16)
    exact = {}
    for file in checkpoint.glob("model*.safetensors"):
        exact |= load_file(file)
    state = model.state_dict()
    equal = sum(torch.equal(tensor.bfloat16(), state[key]) for key, tensor in exact.items())
    report.add(
        f"{name}: tensors of the export equal to the checkpoint's, rounded by torch",
        equal,
        len(exact),
        equal == len(exact),
    )
    add_loss(report, f"{name}, exported in bf16", ours(folder, text), theirs(model, windows))


def checkpoints(report, scratch, text, windows):
    cases = [
        ("untied", {}, BUILD),
        ("tied", {"tie_word_embeddings": True}, BUILD),
        ("scaled RoPE", {"rope_parameters": SCALING}, BUILD),
        ("several files, tied", {"tie_word_embeddings": True}, SPLIT),
        ("several files", {}, SPLIT),
    ]
    for number, (name, settings, build) in enumerate(cases):
        torch.manual_seed(number)
        start, out = scratch / f"start-{number}", scratch / f"run-{number}"
        drawn(**settings).save_pretrained(start)
        run(
            build / "train_llama3",
            "--ranks",
            RANKS,
            "--model",
            start,
            "--data",
            text / "train.tok",
            "--seq",
            T,
            "--batch",
            BATCH,
            "--steps",
            STEPS,
            "--lr",
            LR,
            "--min-lr",
            LR,
            "--warmup",
            0,
            "--eps",
            EPS,
            "--out",
            out,
        )
        checkpoint = out / "latest"
        weights = sorted(checkpoint.glob("model*.safetensors"))
        several = build == SPLIT
        report.add(
            f"{name}: files of weights, and an index",
            f"{len(weights)}, {'an' if (checkpoint / 'model.safetensors.index.json').is_file() else 'no'} index",
            "2 or more, an index" if several else "1, no index",
            (len(weights) > 1) == several == (checkpoint / "model.safetensors.index.json").is_file(),
        )
        model, complaints = load(checkpoint)
        report.add(
            f"{name}: the checkpoint's directory in from_pretrained, complaints",
            complaints or "none",
            "none",
            not complaints,
        )
        report.add(f"{name}: its dtype", model.dtype, torch.float32, model.dtype == torch.float32)
        loss = ours(checkpoint, text)
        add_loss(report, f"{name}, the checkpoint", loss, theirs(model, windows))
        if "rope_parameters" in settings:
            plain = LlamaForCausalLM.from_pretrained(
                checkpoint, rope_parameters={"rope_type": "default", "rope_theta": SCALING["rope_theta"]}
            )
            change = abs(theirs(plain, windows) - loss) / loss
            report.add(
                f"{name}: what that loss would change by without the scaling, relative",
                f"{change:.1e}",
                f">= {NOTICED:.0e}",
                change >= NOTICED,
            )
        compare_moments(report, name, start, out, checkpoint, text)
        compare_export(report, name, build, checkpoint, scratch / f"export-{number}", text, windows)


def saved_by_transformers(report, scratch, text, windows):
    for tied in (False, True):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for shards in (None, "1MB"):
                torch.manual_seed(7 + tied)
                folder = scratch / f"saved-{tied}-{dtype}-{shards}"
                drawn(tie_word_embeddings=tied).to(dtype).save_pretrained(
                    folder, **({"max_shard_size": shards} if shards else {})
                )
                model = LlamaForCausalLM.from_pretrained(
                    folder, dtype=torch.float32
                )  # not the original model: to() also rounded RoPE's frequencies
                files = len(list(folder.glob("*.safetensors")))
                if (files > 1) != bool(shards):
                    sys.exit(
                        f"error: save_pretrained made {files} files with max_shard_size {shards}: the models here are "
                        f"of another size than thought"
                    )
                add_loss(
                    report,
                    f"save_pretrained, {'tied' if tied else 'untied'}, {str(dtype).removeprefix('torch.')}, files: "
                    f"{files}",
                    ours(folder, text),
                    theirs(model, windows),
                )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, help="write the table here (Markdown)")
    args = args.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = Report()
    make = ["make", "-s", "-C", TOP, "PRECISION=fp32"]
    run(*make, *(f"build/cpu-fp32/{name}" for name in ("train_llama3", "convert_llama3", "eval_llama3")))
    split = [f"build/split-fp32/{name}" for name in ("train_llama3", "convert_llama3")]
    run(*make, "BUILD=build/split-fp32", "CFLAGS=-O3 -DMAX_FILE_BYTES=1000000", *split)
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        text = scratch / "text"
        run(
            TOP / "dev" / "data" / "text.sh",
            text,
            *sorted(TOP.glob("*.h")),
            env=os.environ | {"VOCAB_SIZE": str(VOCABULARY)},
        )
        few = tokens(text / "val.tok")[: WINDOWS * T + 1]
        write_token_file(text / "few.tok", text, few.tolist(), VOCABULARY)
        windows = windows_of(few, range(WINDOWS))
        checkpoints(report, scratch, text, windows)
        saved_by_transformers(report, scratch, text, windows)
    if args.out:
        commit = run("git", "-C", TOP, "rev-parse", "--short", "HEAD").decode().strip()
        rows = [(what, figure, bound, good) for what, figure, bound, good in report.rows]
        args.out.write_text(
            f"# Checkpoints in transformers {importlib.metadata.version('transformers')}, torch "
            f"{importlib.metadata.version('torch')}\n\n"
            f"`python dev/pytorch/compare_checkpoint.py`; tree of commit {commit}, fp32 build; models of 0.6 M "
            f"parameters, {STEPS} steps on {RANKS} ranks.\n\n"
            + compare_tokenizer.table(["what", "found", "expected", "good"], rows),
            encoding="utf-8",
        )
    if report.wrong:
        sys.exit(f"error: {report.wrong} of {len(report.rows)} figures miss their bounds")
    print(f"{len(report.rows)} figures, all within their bounds")


if __name__ == "__main__":
    main()
