#!/usr/bin/env python3
"""data.py OUTDIR: writes the models and the token files of the fault laboratory. Needs only the standard library.

The text is this repository's own documentation and headers, and a token is a byte, so that no tokenizer is needed.
masked.tok has the same text in windows of --seq 64 tokens that end in padding, which its loss mask leaves out.
"""
import glob
import json
import random
import struct
import sys

WINDOW = 64
MODEL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256,
         "max_position_embeddings": 128, "rope_theta": 10000, "tie_word_embeddings": False}
# Of the 8 wavelengths, from 6 to 20,000 positions, this divides the frequencies of all but the first.
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
MODELS = {"plain": MODEL, "tied": {**MODEL, "tie_word_embeddings": True}, "scaled": {**MODEL, "rope_scaling": SCALING}}
TEXTS = ["README.md", "CONTRIBUTING.md", "docs/guide/*.md", "*.h", "lib/*.h", "run/*.h"]


def write_tokens(path, tokens, mask=None):
    """The format is described in lib/io/token_files.h."""
    header = b"LLM3TOK1" + struct.pack("<IIIIQ", 1, 2, 256, 1 if mask else 0, len(tokens)) + bytes(32)
    with open(path, "wb") as f:
        f.write(header + struct.pack(f"<{len(tokens)}H", *tokens) + (mask or b""))


def padded_windows(text):
    """Pieces of 16 to 64 bytes, each with padding up to a window, and 1 for each byte that is a target."""
    choose = random.Random(1)
    tokens, mask, at = bytearray(), bytearray(), 0
    while at + WINDOW <= len(text):
        length = choose.randint(16, WINDOW)
        tokens += text[at:at + length] + bytes(WINDOW - length)
        mask += b"\1" * length + bytes(WINDOW - length)
        at += length
    return bytes(tokens), bytes(mask)


def main():
    if len(sys.argv) != 2:
        sys.exit(f"error: data.py was given {len(sys.argv) - 1} arguments, expected one: data.py OUTDIR")
    out = sys.argv[1]
    files = [path for pattern in TEXTS for path in sorted(glob.glob(pattern))]
    if not files:
        sys.exit("error: there is no README.md here: start data.py in the repository's top folder")
    text = b"".join(open(path, "rb").read() for path in files)
    write_tokens(f"{out}/train.tok", text)
    write_tokens(f"{out}/masked.tok", *padded_windows(text))
    for name, model in MODELS.items():
        with open(f"{out}/{name}.json", "w") as f:
            json.dump(model, f)


main()
