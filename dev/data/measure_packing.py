"""measure_packing.py: packs real dialogues with chat --pack, and measures padding, cuts and losses.

    pip install chatterbot-corpus pyyaml
    make -C dev/data && make PRECISION=fp32 train_llama3
    python dev/data/measure_packing.py MODEL [--conversations 5000] [--losses 24] [--out dev/results/packing.md]

MODEL is a Hugging Face directory with tokenizer.model or tokenizer.json, for example the one that dev/data/smollm2.py
writes. The dialogues are those of the PyPI package chatterbot-corpus, in 28 languages, shuffled with a fixed seed: what
is said in turns belongs to a user and an assistant. Every packed file is read here again: each conversation must be
there once, uncut, with its targets. With --losses N, the model's loss on N of them, packed, must be within 1e-6 of the
loss with one conversation per window.
"""

import argparse
import importlib.util
import json
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import yaml

TOP = Path(__file__).resolve().parent.parent.parent
CHAT, PROGRAM = TOP / "build" / "data" / "chat", TOP / "build" / "cpu-fp32" / "train_llama3"
WINDOWS = (128, 256, 512, 1024, 2048)
HEADER = struct.Struct("<8sIIIIQ32s128x")


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def dialogues():
    """Lists of messages, from all files of the package that hold at least a question and an answer."""
    package = importlib.util.find_spec("chatterbot_corpus")
    if not package:
        sys.exit("error: the package chatterbot-corpus is missing: pip install chatterbot-corpus pyyaml")
    for path in sorted(Path(package.origin).parent.glob("data/*/*.yml")):
        for turns in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, str) for turn in turns):
                continue
            yield [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


class TokenFile:
    def __init__(self, path):
        data = path.read_bytes()
        self.header = HEADER.unpack_from(data)
        width, self.flags, count = self.header[2], self.header[4], self.header[5]
        self.ids = struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", data, HEADER.size)
        self.mask = bytes(byte & 1 for byte in data[HEADER.size + count * width :])  # bit 1: the document ends

    def documents(self, end):
        """(first token, ids, mask) of each document that `end` ends; a single `end` is padding."""
        first = 0
        for i, token in enumerate(self.ids):
            if token == end:
                if i > first:
                    yield first, self.ids[first : i + 1], self.mask[first : i + 1]
                first = i + 1


def next_fit(lengths, window):
    """Windows that are needed if each conversation goes to the last window or a new one."""
    windows = left = 0
    for n in lengths:
        if n > left:
            windows += -(-n // window)
            left = -n % window
        else:
            left -= n
    return windows


def fewest_windows(lengths, window):
    """Windows that any packing needs: the bound L2 of Martello and Toth, Knapsack Problems (1990), section 8.3. Of the
    windows of a longer conversation, only the last one can hold others."""
    whole, sizes = sum(n // window for n in lengths), [n % window for n in lengths if n % window]
    bound = 0
    for k in range(window // 2 + 1):
        alone = sum(n > window - k for n in sizes)
        halves = [n for n in sizes if window / 2 < n <= window - k]
        rest = sum(n for n in sizes if k <= n <= window / 2) - sum(window - n for n in halves)
        bound = max(bound, alone + len(halves) + max(0, -(-rest // window)))
    return whole + bound


def require(condition, otherwise):
    if not condition:
        sys.exit(f"error: {otherwise}")


def measure(tokenizer, lines, scratch, window, loose):
    end = loose.ids[-1]
    packed_path = scratch / f"packed-{window}.tok"
    run(CHAT, "--tokenizer", tokenizer, "--out-train", packed_path, "--pack", window, lines)
    packed = TokenFile(packed_path)
    require(packed.flags == 1 | window << 8 and len(packed.ids) % window == 1, "the header or the size is wrong")
    documents, originals = list(packed.documents(end)), list(loose.documents(end))
    same = Counter(d[1:] for d in documents) == Counter(d[1:] for d in originals)
    require(same, "the packed conversations differ from the originals")
    cut = sum(first // window != (first + len(ids) - 1) // window for first, ids, _ in documents)
    lengths = [len(ids) for _, ids, _ in originals]
    too_long = sum(n > window for n in lengths)
    require(cut == too_long, f"{cut} conversations are cut, {too_long} are longer than a window")
    tokens, windows = sum(lengths), len(packed.ids) // window
    loosely_cut = sum(first // window != (first + len(ids) - 1) // window for first, ids, _ in originals)

    def padding(windows):
        return 100 * (1 - tokens / (windows * window))

    alone = sum(-(-n // window) for n in lengths)
    row = [
        f"{window:,}",
        f"{windows:,}",
        f"{fewest_windows(lengths, window):,}",
        f"{padding(windows):.2f} %",
        f"{cut}",
        f"{padding(next_fit(lengths, window)):.2f} %",
        f"{padding(alone):.2f} %",
        f"{100 * loosely_cut / len(lengths):.1f} %",
    ]
    return "| " + " | ".join(row) + " |", padding(windows)


def compare_losses(model, tokenizer, texts, scratch):
    """Losses of the model on these conversations: packed, and one in each window."""
    window, lines, packed = 512, scratch / "few.jsonl", scratch / "few.tok"
    lines.write_text("".join(texts), encoding="utf-8")
    run(CHAT, "--tokenizer", tokenizer, "--out-train", packed, "--pack", window, lines)
    (scratch / "alone").mkdir()
    for i, text in enumerate(texts):
        lines.write_text(text, encoding="utf-8")
        run(CHAT, "--tokenizer", tokenizer, "--out-train", scratch / "alone" / f"{i:04}.tok", "--pack", window, lines)
    results = []
    for data in (packed, scratch / "alone" / "*.tok"):
        options = ["--model", model, "--eval", data, "--seq", window, "--batch", 1, "--doc-mask"]
        results.append(json.loads(run(PROGRAM, *options).splitlines()[-1]))
    return [r["loss"] for r in results], [r["tokens"] for r in results], len(TokenFile(packed).ids) // window


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--conversations", type=int, default=5000)
    parser.add_argument("--losses", type=int, default=0)
    parser.add_argument("--out")
    options = parser.parse_args()
    tokenizer = Path(options.model) / "tokenizer.json"
    if not tokenizer.exists():
        tokenizer = Path(options.model) / "tokenizer.model"
    talks = list(dialogues())
    random.Random(1).shuffle(talks)
    talks = talks[: options.conversations]
    texts = [json.dumps({"messages": talk}, ensure_ascii=False) + "\n" for talk in talks]
    commit = run("git", "-C", TOP, "rev-parse", "--short", "HEAD").strip()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        lines = scratch / "dialogues.jsonl"
        lines.write_text("".join(texts), encoding="utf-8")
        run(CHAT, "--tokenizer", tokenizer, "--out-train", scratch / "loose.tok", lines)
        loose = TokenFile(scratch / "loose.tok")
        rows, paddings = zip(*(measure(tokenizer, lines, scratch, window, loose) for window in WINDOWS))
        lengths = sorted(len(ids) for _, ids, _ in loose.documents(loose.ids[-1]))
        failed = not max(paddings[1:]) < 5
        report = [
            "# Packed conversations",
            "",
            f"`python {' '.join(sys.argv)}`; commit {commit}.",
            "",
            f"{len(talks):,} dialogues of PyPI's chatterbot-corpus in {sum(lengths):,} tokens: from {lengths[0]} to "
            f"{lengths[-1]}, half of them at most {lengths[len(lengths) // 2]}. Each conversation was found once in "
            "each packed file, with its targets, and uncut unless it is longer than the window.",
            "",
            "| tokens of a window | windows | any packing needs at least | padding | longer than a window, cut "
            "| padding if each goes to the last window or a new one | padding with one a window | cut without --pack |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"The padding must be below 5 % in windows of {WINDOWS[1]} tokens and more: {'no' if failed else 'yes'}. "
            f"In windows of {WINDOWS[0]}, little fits beside a dialogue, which has "
            f"{sum(lengths) / len(lengths):.0f} tokens on average.",
        ]
        if options.losses:
            losses, tokens, windows = compare_losses(options.model, tokenizer, texts[: options.losses], scratch)
            off = abs(losses[0] / losses[1] - 1)
            met = off <= 1e-6 and tokens[0] == tokens[1]
            failed |= not met
            report += [
                "",
                f"Loss of {options.model} on {options.losses} of them with `--doc-mask`: {losses[0]:.9g} packed in "
                f"{windows} windows of 512 tokens, {losses[1]:.9g} with one in each of {options.losses} windows, over "
                f"{tokens[0]} and {tokens[1]} targets. The relative difference is {off:.1e} <= 1e-6: "
                f"{'yes' if met else 'no'}.",
            ]
    text = "\n".join(report) + "\n"
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    print(text)
    sys.exit(failed)


if __name__ == "__main__":
    main()
