"""field_files.py: small models, tokenizers and token files like those that people bring, made without any library.

    field_files.py model DIR [--specials A,B,…] [--front NAME] [--config JSON] [--tokenizer-config JSON] [--says NAME]
    field_files.py tokens FILE VOCABULARY COUNT [--no-targets]

A model has one block, random weights, and a byte-level tokenizer of 256 bytes and the special tokens. With --says its
weights give one token for ever.
"""

import argparse
import json
import random
import struct
from pathlib import Path

DIM, INNER, HEADS = 32, 64, 4


def byte_names():
    """GPT-2's characters for the 256 bytes, in the order of their code points: the order of the ids here."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in own]
    return sorted([chr(b) for b in own] + [chr(0x100 + i) for i in range(len(others))])


def write_tokenizer(folder, specials, front, config):
    vocab = {name: i for i, name in enumerate(byte_names())}
    added = [
        {"id": 256 + i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, name in enumerate(specials)
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    post = None
    if front:
        ids = {front: {"id": front, "ids": [256 + specials.index(front)], "tokens": [front]}}
        single = [{"SpecialToken": {"id": front, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        post = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": ids}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": []}  # fmt: skip
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": byte_level, "post_processor": post, "decoder": byte_level,
                 "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)


def tensors_of(vocabulary, tied, says):
    """Names, shapes and values; with `says`, the head gives one token for ever."""
    rng = random.Random(0)
    block = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (vocabulary, DIM), block + "input_layernorm.weight": (DIM,),
              block + "self_attn.q_proj.weight": (DIM, DIM), block + "self_attn.k_proj.weight": (DIM // 2, DIM),
              block + "self_attn.v_proj.weight": (DIM // 2, DIM), block + "self_attn.o_proj.weight": (DIM, DIM),
              block + "post_attention_layernorm.weight": (DIM,), block + "mlp.gate_proj.weight": (INNER, DIM),
              block + "mlp.up_proj.weight": (INNER, DIM), block + "mlp.down_proj.weight": (DIM, INNER),
              "model.norm.weight": (DIM,)}  # fmt: skip
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, DIM)
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        values = [1.0] * count if len(shape) == 1 else [rng.gauss(0, 0.2) for _ in range(count)]
        if says is not None and name.startswith("model.layers"):
            values = [0.0] * count
        if says is not None and name == "model.embed_tokens.weight":
            values = [1.0] * count
        if says is not None and name == "lm_head.weight":
            values = [float(i // DIM == says) for i in range(count)]
        yield name, shape, values


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, shape, values in tensors:
        part = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(args):
    folder = Path(args.folder)
    folder.mkdir(exist_ok=True)
    specials = args.specials.split(",") if args.specials else []
    config = {"model_type": "llama", "hidden_size": DIM, "intermediate_size": INNER, "num_hidden_layers": 1,
              "num_attention_heads": HEADS, "num_key_value_heads": 2, "vocab_size": 256 + len(specials),
              "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip
    config.update(json.loads(args.config))
    (folder / "config.json").write_text(json.dumps(config))
    if specials:
        write_tokenizer(folder, specials, args.front, args.tokenizer_config)
    says = 256 + specials.index(args.says) if args.says else None
    write_safetensors(
        folder / "model.safetensors", tensors_of(config["vocab_size"], config["tie_word_embeddings"], says)
    )


def write_tokens(args):
    """A file of version 1."""
    draw = random.Random(1)
    ids = [draw.randrange(args.vocabulary) for _ in range(args.count)]
    header = struct.pack("<8sIIIIQ32x", b"LLM3TOK1", 1, 2, args.vocabulary, int(args.no_targets), args.count)
    mask = bytes(args.count) if args.no_targets else b""
    Path(args.file).write_bytes(header + struct.pack(f"<{args.count}H", *ids) + mask)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True)
    model = kinds.add_parser("model")
    model.add_argument("folder")
    for option in "specials", "front", "says", "tokenizer-config":
        model.add_argument(f"--{option}")
    model.add_argument("--config", default="{}")
    model.set_defaults(write=write_model)
    tokens = kinds.add_parser("tokens")
    tokens.add_argument("file")
    tokens.add_argument("vocabulary", type=int)
    tokens.add_argument("count", type=int)
    tokens.add_argument("--no-targets", action="store_true")
    tokens.set_defaults(write=write_tokens)
    args = parser.parse_args()
    args.write(args)


if __name__ == "__main__":
    main()
