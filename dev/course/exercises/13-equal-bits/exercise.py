"""Runs of a small model in several layouts, compared by the bytes of their weights after some steps."""
import json
import random
import struct
import tempfile
from functools import lru_cache
from pathlib import Path

from answers import BadAnswer
from program import Failure, run, trainer

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
          "vocab_size": 256, "max_position_embeddings": 64, "rope_theta": 500000, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": False, "hidden_act": "silu"}
STEPS, T = 4, 32
REFERENCE = "--ranks 1 --batch 1 --accum 8 --deterministic"
RUNS = {
    "A": "--ranks 8 --batch 1 --accum 1 --deterministic",
    "B": "--ranks 2 --batch 1 --accum 4",
    "C": "--ranks 2 --batch 1 --accum 4 --sharding no_shard --deterministic",
    "D": "--ranks 4 --batch 2 --accum 1 --deterministic",
    "E": "--ranks 2 --pp 2 --batch 1 --accum 8 --deterministic",
    "F": "--ranks 2 --tp 2 --batch 1 --accum 8 --deterministic",
}
REASONS = {
    "A": "The tree over 8 ranks is the same tree as that over 8 micro-batches: a micro-batch's gradient is a leaf.",
    "B": "Without --deterministic, micro-batches are added in turn: ((a + b) + c) + d, not (a + b) + (c + d).",
    "C": "The strategy decides who holds a sum, not how it is formed.",
    "D": "With two sequences in a micro-batch, a matmul sums over both inside: the leaves of the tree are other ones.",
    "E": "A stage computes what one rank computes, in the same order; messages do not change bits.",
    "F": "Tensor parallelism splits the sum inside a matmul: two partial sums are rounded and then added.",
}


def write_tokens(path):
    """A token file of random tokens (the format is in docs/guide/training-and-data.md)."""
    tokens = random.Random(1).choices(range(256), k=8 * (STEPS + 1) * T + 1)
    head = b"LLM3TOK1" + struct.pack("<IIIIQ", 1, 2, 256, 0, len(tokens)) + bytes(32)
    path.write_bytes(head + struct.pack(f"<{len(tokens)}H", *tokens))


def weights(folder, options):
    """The bytes of the model after STEPS steps."""
    out = Path(tempfile.mkdtemp(dir=folder))
    done = run([trainer(), "--model", folder, "--data", folder / "train.tok", "--seq", str(T), "--steps", str(STEPS),
                "--lr", "0.01", "--warmup", "0", "--threads", "1", "--out", out, *options.split()])
    if done.returncode:
        raise Failure(f"train_llama3 {options}: {done.stderr.strip()}")
    return b"".join(path.read_bytes() for path in sorted((out / "latest").glob("model*.safetensors")))


@lru_cache(maxsize=None)
def equal_runs():
    """The letters of the runs whose weights have the reference's bits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        write_tokens(folder / "train.tok")
        expected = weights(folder, REFERENCE)
        return {letter for letter, options in RUNS.items() if weights(folder, options) == expected}


def facts():
    return {"reference": REFERENCE, "runs": "\n".join(f"    {letter}  {options}" for letter, options in RUNS.items())}


def check(answer):
    letters = answer.upper().replace(",", " ").replace(";", " ").split()
    if len(letters) == 1:
        letters = list(letters[0])
    for letter in letters:
        if letter not in RUNS:
            raise BadAnswer(f"'{letter}' is no run; expected the letters of all runs with equal bits, from A to "
                            f"{max(RUNS)}, such as A='A B'")
    right = equal_runs()
    if set(letters) == right:
        print("right")
        return True
    print(f"wrong: {len(set(letters) & right)} of your {len(set(letters))} runs have the bits of one rank, and "
          f"{len(right - set(letters))} that have them {'is' if len(right - set(letters)) == 1 else 'are'} missing.")
    if "B" in letters and "B" not in right:
        print("One of your runs does not even ask for a fixed order.")
    elif "D" in letters and "D" not in right:
        print("What is a leaf of the tree: a sequence, or a micro-batch?")
    elif "F" in letters and "F" not in right:
        print("Which layouts only move numbers, and which split a sum inside an op?")
    else:
        print("Which layouts only move numbers to other ranks? Those cannot change bits.")
    return False


def solution():
    right = equal_runs()
    lines = [f"{' '.join(sorted(right))}\n"]
    for letter, reason in REASONS.items():
        lines.append(f"{letter}: {'equal' if letter in right else 'differs'}. {reason}")
    return "\n".join(lines), [f"train_llama3 {REFERENCE} … --out a   and compare a/latest/model.safetensors by cmp"]
