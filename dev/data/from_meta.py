"""from_meta.py: converts Meta's releases of Llama 3, consolidated.NN.pth and params.json, to a Hugging Face directory.

    pip install torch
    python dev/data/from_meta.py DIR OUTDIR [--rope-factor F] [--positions N]

Writes config.json, model.safetensors (in the dtype of the release), tokenizer.model and tokenizer_config.json, which
./train_llama3 --model and transformers read. It handles Llama 3, 3.1, 3.2 (1B, 3B) and 3.3, base and instruct, in one
or several model-parallel parts, but neither the vision models nor quantized ones. The parts are memory-mapped, so only
one tensor at a time is in memory.

params.json says whether RoPE is scaled, but not by how much. The factor is 8, or 32 if embedding and head are tied, as
in Meta's 3.1 and 3.2 models on Hugging Face. It does not say either for how many positions the model was trained:
131,072 if RoPE is scaled, otherwise 8,192.
"""

import argparse
import json
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path

WRITTEN = {"torch.float32": "F32", "torch.bfloat16": "BF16", "torch.float16": "F16"}
WHOLE, ROWS, COLUMNS = (
    None,
    0,
    1,
)  # how a tensor is distributed over the parts: each has all of it, or a slice of dimension 0 or 1
# Meta's name, Hugging Face's name, how it is split. torch.nn.Linear stores (out, in), so a linear layer that is split
# by its outputs is split by rows.
MODEL = [
    ("tok_embeddings.weight", "model.embed_tokens.weight", ROWS),
    ("norm.weight", "model.norm.weight", WHOLE),
    ("output.weight", "lm_head.weight", ROWS),
]
BLOCK = [
    ("attention_norm.weight", "input_layernorm.weight", WHOLE),
    ("attention.wq.weight", "self_attn.q_proj.weight", ROWS),
    ("attention.wk.weight", "self_attn.k_proj.weight", ROWS),
    ("attention.wv.weight", "self_attn.v_proj.weight", ROWS),
    ("attention.wo.weight", "self_attn.o_proj.weight", COLUMNS),
    ("ffn_norm.weight", "post_attention_layernorm.weight", WHOLE),
    ("feed_forward.w1.weight", "mlp.gate_proj.weight", ROWS),
    ("feed_forward.w2.weight", "mlp.down_proj.weight", COLUMNS),
    ("feed_forward.w3.weight", "mlp.up_proj.weight", ROWS),
]
SPECIAL_TOKENS = 256  # after the base vocabulary; <|begin_of_text|> is the first of them
END_OF_TEXT, END_OF_MESSAGE, END_OF_TURN = 1, 8, 9
TOKENIZER_CONFIG = {  # Meta's models have seen <|begin_of_text|> in front of each text
    "add_bos_token": True,
    "bos_token": "<|begin_of_text|>",
    "eos_token": "<|end_of_text|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
}


def die(text):
    sys.exit(f"error: {text}")


# ---------------------------------------------------------------- reading


def read_params(folder):
    path = folder / "params.json"
    try:
        params = json.loads(path.read_text())
        dim, heads = params["dim"], params["n_heads"]
        shape = {
            "layers": params["n_layers"],
            "heads": heads,
            "kv_heads": params.get("n_kv_heads") or heads,
            "dim": dim,
            "head_dim": dim // heads,
        }
        rope = {"theta": float(params["rope_theta"]), "scaled": bool(params.get("use_scaled_rope", False))}
        eps = float(params["norm_eps"])
    except OSError as error:
        die(f"{path} cannot be read: {error.strerror}; expected a folder with params.json and consolidated.00.pth")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        die(
            f"{path}: {error!r}; expected the params.json of a release of Llama 3, with dim, n_layers, n_heads, "
            f"norm_eps and rope_theta"
        )
    if dim % heads or heads % shape["kv_heads"]:
        die(
            f"{path}: dim {dim}, n_heads {heads} and n_kv_heads {shape['kv_heads']} do not divide; is the file damaged?"
        )
    return shape, rope, eps


def open_parts(folder):
    import torch

    paths = sorted(folder.glob("consolidated.*.pth"))
    wanted = [folder / f"consolidated.{i:02d}.pth" for i in range(max(1, len(paths)))]
    if paths != wanted:
        die(
            f"{folder} holds {', '.join(p.name for p in paths) or 'no consolidated.*.pth'}; expected {wanted[0].name} "
            f"to {wanted[-1].name} without a gap"
        )
    parts = []
    for path in paths:
        try:
            part = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # pickle, zip and torch raise errors of many types
            die(
                f"{path} cannot be read: {str(error).splitlines()[0]}; expected a file of weights as torch saves them; "
                f"download it again"
            )
        if not isinstance(part, dict):
            die(f"{path} holds a {type(part).__name__}, expected a dictionary of tensors")
        parts.append(
            {name: tensor for name, tensor in part.items() if name != "rope.freqs"}
        )  # computed from params.json
        if set(parts[-1]) != set(parts[0]):
            die(
                f"{path} holds other tensors than {paths[0].name}, such as {min(set(parts[-1]) ^ set(parts[0]))}; are "
                f"all parts of one release?"
            )
    return parts


class Release:
    """The parts as one model: names, shapes, and each tensor in Hugging Face's layout."""

    def __init__(self, folder):
        self.folder = folder
        self.shape, self.rope, self.eps = read_params(folder)
        self.parts = open_parts(folder)
        s, first = self.shape, self.parts[0]
        self.rows = [
            (f"layers.{i}.{a}", f"model.layers.{i}.{b}", split) for i in range(s["layers"]) for a, b, split in BLOCK
        ]
        self.rows = MODEL[:1] + self.rows + MODEL[1:]
        missing = [name for name, _, _ in self.rows if name not in first and name != "output.weight"]
        surplus = sorted(set(first) - {name for name, _, _ in self.rows})
        if missing or surplus:
            die(
                f"{folder}: "
                + (
                    f"tensor {missing[0]} is missing"
                    if missing
                    else f"tensor {surplus[0]} has no place in a Llama 3 text model"
                )
                + "; expected the weights that params.json describes, neither vision nor quantized"
            )
        self.vocabulary = self.size("tok_embeddings.weight", ROWS)
        self.inner = self.size("layers.0.feed_forward.w1.weight", ROWS)
        self.dtype = first["norm.weight"].dtype
        for name, _, split in self.rows:
            if name in first:
                self.check(name, split)
        self.tied = "output.weight" not in first or all(
            p["output.weight"].equal(p["tok_embeddings.weight"]) for p in self.parts
        )
        if self.tied:
            self.rows = self.rows[:-1]

    def size(self, name, dimension):
        return sum(part[name].shape[dimension] for part in self.parts)

    def whole_shape(self, name):
        s = self.shape
        queries, keys = s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"]
        kind = name.split(".")[-2]
        return {
            "tok_embeddings": (self.vocabulary, s["dim"]),
            "output": (self.vocabulary, s["dim"]),
            "wq": (queries, s["dim"]),
            "wk": (keys, s["dim"]),
            "wv": (keys, s["dim"]),
            "wo": (s["dim"], queries),
            "w1": (self.inner, s["dim"]),
            "w3": (self.inner, s["dim"]),
            "w2": (s["dim"], self.inner),
        }.get(kind, (s["dim"],))

    def check(self, name, split):
        want, n = self.whole_shape(name), len(self.parts)
        part = tuple(size // n if i == split else size for i, size in enumerate(want))
        for i, tensors in enumerate(self.parts):
            t = tensors[name]
            if tuple(t.shape) != part or (split is not WHOLE and want[split] % n):
                die(
                    f"{self.folder}: {name} in part {i} is {' x '.join(map(str, t.shape))}, expected "
                    f"{' x '.join(map(str, part))}, a part of {' x '.join(map(str, want))} in {n}"
                )
            if t.dtype != self.dtype or str(t.dtype) not in WRITTEN:
                die(
                    f"{self.folder}: {name} in part {i} is {t.dtype}, expected one of {', '.join(WRITTEN)}, the same "
                    f"in all tensors ({self.dtype} in norm.weight)"
                )

    def tensor(self, name, split):
        import torch

        pieces = [part[name] for part in self.parts]
        t = pieces[0] if split is WHOLE or len(pieces) == 1 else torch.cat(pieces, dim=split)
        if ".wq." in name or ".wk." in name:
            t = rows_by_halves(t, self.shape["head_dim"])
        return t.contiguous()


def rows_by_halves(matrix, head_dim):
    """RoPE rotates pairs of a head's rows. In Meta's layout a pair is adjacent, 2i and 2i + 1; in Hugging Face's it is
    i and i + HD/2. Reorders (heads, HD/2, 2, C) to (heads, 2, HD/2, C)."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


# ---------------------------------------------------------------- writing


def config(release, factor, positions):
    s, special = release.shape, release.vocabulary - SPECIAL_TOKENS
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": release.vocabulary,
        "hidden_size": s["dim"],
        "intermediate_size": release.inner,
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "num_key_value_heads": s["kv_heads"],
        "head_dim": s["head_dim"],
        "max_position_embeddings": positions,
        "rms_norm_eps": release.eps,
        "rope_theta": release.rope["theta"],
        "rope_scaling": scaling if release.rope["scaled"] else None,
        "tie_word_embeddings": release.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(release.dtype).removeprefix("torch."),
        "bos_token_id": special,
        "eos_token_id": [special + END_OF_TEXT, special + END_OF_MESSAGE, special + END_OF_TURN],
    }


def write_weights(release, path):
    """safetensors: 8 bytes with the length of the header, the header as JSON, then the tensors."""
    import torch

    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, written, _ in release.rows:
        shape = release.whole_shape(name)
        size = release.dtype.itemsize
        for n in shape:
            size *= n
        header[written] = {"dtype": WRITTEN[str(release.dtype)], "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for name, _, split in release.rows:
            f.write(release.tensor(name, split).view(torch.uint8).numpy())
        f.flush()
        os.fsync(f.fileno())
    if path.stat().st_size != 8 + len(text) + at:
        die(f"{path} has {path.stat().st_size} bytes, expected {8 + len(text) + at}")
    return at


def find_tokenizer(folder):
    """Next to the weights, or in the folder above, where Meta's downloads of Llama 3 put it."""
    for path in (folder / "tokenizer.model", folder.parent / "tokenizer.model"):
        if path.is_file():
            return path
    die(
        f"there is no tokenizer.model in {folder} or the folder above; expected the one that was released with the "
        f"weights"
    )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("folder", type=Path, metavar="DIR")
    args.add_argument("out", type=Path, metavar="OUTDIR")
    args.add_argument(
        "--rope-factor", type=float, help="default: 8, of tied models 32; only where params.json has use_scaled_rope"
    )
    args.add_argument(
        "--positions", type=int, help="max_position_embeddings; default: 131072 with scaled RoPE, else 8192"
    )
    args = args.parse_args()
    try:
        import torch  # noqa: F401
    except ImportError:
        die("torch is not installed; pip install torch")
    if args.out.exists():
        die(f"{args.out} exists already; choose another name, or remove it first")
    tokenizer = find_tokenizer(args.folder)
    release = Release(args.folder)
    words = tokenizer.read_bytes().split()
    if len(words) != 2 * (release.vocabulary - SPECIAL_TOKENS) or words[1] != b"0":
        die(
            f"{tokenizer} is not the tokenizer of Llama 3 for a vocabulary of {release.vocabulary}; expected "
            f"{release.vocabulary - SPECIAL_TOKENS} lines with a token and its number, as released with the weights"
        )
    if args.rope_factor is not None and not release.rope["scaled"]:
        die(
            f"--rope-factor {args.rope_factor:g} was given, but RoPE is not scaled: {args.folder / 'params.json'} has "
            f"no use_scaled_rope"
        )
    factor = args.rope_factor or (32.0 if release.tied else 8.0)
    positions = args.positions or (131072 if release.rope["scaled"] else 8192)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{args.out.name}.partial-", dir=args.out.parent))
    except OSError as error:
        die(f"{args.out} cannot be made: {error.strerror}; choose another name")
    try:
        size = write_weights(release, partial / "model.safetensors")
        (partial / "config.json").write_text(
            json.dumps(config(release, factor, positions), indent=2) + "\n", encoding="ascii"
        )
        (partial / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=2) + "\n", encoding="ascii")
        shutil.copyfile(tokenizer, partial / "tokenizer.model")
        partial.chmod(0o777 & ~current_umask())
        partial.rename(args.out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        die(f"{args.out} cannot be written: {error.strerror}; is the disk full?")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(
        f"{args.out}: {size // release.dtype.itemsize / 1e6:.1f} M parameters in {len(release.rows)} tensors, "
        f"{WRITTEN[str(release.dtype)]}, from {len(release.parts)} part(s), "
        f"embedding and head {'tied' if release.tied else 'apart'}, RoPE "
        f"{f'scaled by {factor:g}' if release.rope['scaled'] else 'not scaled'}, {positions} positions"
    )


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    main()
