"""compare_meta.py: compares dev/data/from_meta.py with Meta's own model code.

    python compare_meta.py [--program ../../build/cpu-fp32/eval_llama3]         needs torch, transformers, llama-models

Small random models of llama-models' Transformer, saved as releases are (one to four parts, fp32 and bf16, with and
without scaled RoPE, tied or not), are converted. Then the logits of transformers' LlamaForCausalLM and the loss of
the C program are compared with Meta's. Each case must also detect the error that it is there for: queries in the
wrong order, RoPE without scaling, parts joined in another order. What is not a release must be refused. Ends with an
error if a bound is missed.
"""

import argparse
import base64
import hashlib
import json
import struct
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.utils import logging

TOP = Path(__file__).resolve().parent.parent.parent
BOUND, NOTICED = 5e-5, 1e-2  # of logits and losses of about 1; how much an error must change them
T, WINDOWS, VOCABULARY = 96, 3, 512
SPLIT = {}  # class to replace: which dimension fairscale splits


def stand_in(name, base, dimension, takes):
    """On one process, fairscale's layers equal torch's. `takes`: how many of the arguments are sizes."""

    def init(self, *sizes, **options):
        base.__init__(self, *sizes[:takes], **({"bias": False} if base is nn.Linear else {}))

    SPLIT[name] = dimension
    return type(name, (base,), {"__init__": init})


def meta_model():
    """llama-models' model.py, with fairscale's layers replaced."""
    layers = types.ModuleType("fairscale.nn.model_parallel.layers")
    layers.ColumnParallelLinear = stand_in("ColumnParallelLinear", nn.Linear, 0, 2)
    layers.RowParallelLinear = stand_in("RowParallelLinear", nn.Linear, 1, 2)
    layers.VocabParallelEmbedding = stand_in("VocabParallelEmbedding", nn.Embedding, 0, 2)
    initialize = types.ModuleType("fairscale.nn.model_parallel.initialize")
    initialize.get_model_parallel_world_size = lambda: 1
    names = ["fairscale", "fairscale.nn", "fairscale.nn.model_parallel"]
    sys.modules.update({name: types.ModuleType(name) for name in names} | {m.__name__: m for m in (layers, initialize)})
    sys.modules[names[2]].initialize, sys.modules[names[2]].layers = initialize, layers
    from llama_models.llama3 import args, model

    return args.ModelArgs, model.Transformer


def release(folder, parts, params, dtype, tied, classes):
    """Writes a release as Meta does; returns the model."""
    arguments, transformer = classes
    model = transformer(arguments(max_batch_size=WINDOWS, max_seq_len=T, **params))
    for name, p in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(p, 0.5, 1.5)
        elif "embeddings" not in name and name != "output.weight":
            nn.init.normal_(p, std=1.5 * p.shape[1] ** -0.5)
    if tied:
        nn.init.normal_(model.tok_embeddings.weight, std=params["dim"] ** -0.5)
        model.output.weight.data.copy_(model.tok_embeddings.weight.data)
    model.to(dtype).float()  # rounded, then computed in fp32
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    tokens = [bytes([b]) for b in range(VOCABULARY - 256)]
    (folder / "tokenizer.model").write_bytes(
        b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens))
    )
    split = {
        name: SPLIT.get(type(model.get_submodule(name.rpartition(".")[0])).__name__)
        for name, _ in model.named_parameters()
    }
    for i in range(parts):
        part = {
            name: (p if split[name] is None else p.chunk(parts, dim=split[name])[i]).detach().to(dtype).clone()
            for name, p in model.named_parameters()
        }
        torch.save(part | {"rope.freqs": torch.zeros(4)}, folder / f"consolidated.{i:02d}.pth")
    return model


def convert(folder, out, *options):
    return subprocess.run(
        [sys.executable, TOP / "dev" / "data" / "from_meta.py", folder, out, *options], capture_output=True, text=True
    )


def logits(folder, tokens, change=None):
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if change:
        change(model)
    with torch.no_grad():
        return model(tokens).logits


def unturned(model):  # queries and keys back in Meta's order
    c = model.config
    for layer in model.model.layers:
        for p in (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight):
            p.data = p.data.reshape(-1, 2, c.head_dim // 2, c.hidden_size).transpose(1, 2).reshape(p.shape)


def swapped(model):  # the parts of one linear layer in reverse order
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.roll(
            model.config.intermediate_size // 2, dims=1
        )


def unscaled(folder):
    def change(model):
        plain = json.loads((folder / "config.json").read_text())
        HD = plain["head_dim"]
        model.model.rotary_emb.inv_freq = 1.0 / plain["rope_theta"] ** (torch.arange(0, HD, 2).float() / HD)

    return change


def token_file(path, tokens, tokenizer):
    ids = tokens.flatten().tolist()
    path.write_bytes(
        b"LLM3TOK1"
        + struct.pack("<IIIIQ", 1, 2, VOCABULARY, 0, len(ids))
        + hashlib.sha256(tokenizer.read_bytes()).digest()
        + struct.pack(f"<{len(ids)}H", *ids)
    )


def program_loss(program, folder, tokens, scratch):
    losses = []
    for i, window in enumerate(tokens):
        file = scratch / f"window-{i}.tok"
        token_file(file, window, folder / "tokenizer.model")  # each file has one window
        run = subprocess.run(
            [program, "--model", folder, "--eval", file, "--seq", str(T - 1), "--batch", "1", "--threads", "1"],
            capture_output=True,
            text=True,
        )
        if run.returncode:
            sys.exit(f"error: the program refuses the converted model: {run.stderr.strip()}")
        losses.append(json.loads(run.stdout)["loss"])
    return sum(losses) / len(losses)


def compare(scratch, program, classes):
    base = {
        "dim": 128,
        "n_layers": 3,
        "n_heads": 8,
        "n_kv_heads": 4,
        "vocab_size": VOCABULARY,
        "multiple_of": 32,
        "ffn_dim_multiplier": 1.3,
        "norm_eps": 1e-5,
        "rope_theta": 500000.0,
    }
    wide = base | {"dim": 256, "n_heads": 4, "n_kv_heads": 2, "use_scaled_rope": True}
    cases = [
        ("Llama 3", 1, base, torch.float32, False),
        ("Llama 3", 2, base, torch.float32, False),
        ("Llama 3", 4, base, torch.bfloat16, False),
        ("Llama 3.1", 1, wide, torch.bfloat16, False),
        ("Llama 3.1", 2, wide, torch.float32, False),
        ("Llama 3.2, tied", 1, wide, torch.bfloat16, True),
    ]
    wrong = []
    for number, (name, parts, params, dtype, tied) in enumerate(cases):
        torch.manual_seed(number)
        folder, out, label = (
            scratch / f"release-{number}",
            scratch / f"converted-{number}",
            f"{name}, {parts} part(s), {str(dtype).removeprefix('torch.')}",
        )
        model = release(folder, parts, params, dtype, tied, classes)
        scaled = params.get("use_scaled_rope", False)
        made = convert(folder, out, *(["--rope-factor", "8"] if tied else []))  # Meta's code has no other factor
        if made.returncode:
            sys.exit(f"error: {label}: {made.stderr.strip()}")
        tokens = torch.randint(0, VOCABULARY - 256, (WINDOWS, T))
        want = model(tokens, 0)
        got = logits(out, tokens)
        loss = nn.functional.cross_entropy(want[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
        figures = {
            "logits": (got - want).abs().max().item(),
            "loss of the C program": abs(program_loss(program, out, tokens, scratch) - loss),
        }
        faults = (
            {"queries not turned round": unturned}
            | ({"parts swapped": swapped} if parts > 1 else {})
            | ({"RoPE not scaled": unscaled(out)} if scaled else {})
        )
        noticed = {what: (logits(out, tokens, change) - want).abs().max().item() for what, change in faults.items()}
        written = json.loads((out / "config.json").read_text())
        if written["tie_word_embeddings"] != tied or bool(written["rope_scaling"]) != scaled:
            wrong.append(f"{label}: config.json has {written}")
        print(
            f"{label}: largest difference of "
            + ", ".join(f"{what} {x:.1e}" for what, x in figures.items())
            + f" (bound {BOUND:.0e}; logits to {want.abs().max():.1f}, loss {loss:.4f}); "
            + ", ".join(f"{what}: {x:.1e}" for what, x in noticed.items()),
            flush=True,
        )
        wrong += [f"{label}: {what} {x:.1e} over {BOUND:.0e}" for what, x in figures.items() if not x <= BOUND]
        wrong += [f"{label}: {what} changes only {x:.1e}" for what, x in noticed.items() if not x >= NOTICED]
        if tied:
            if (
                convert(folder, scratch / "default").returncode
                or json.loads((scratch / "default" / "config.json").read_text())["rope_scaling"]["factor"] != 32
            ):
                wrong.append(f"{label}: the factor of a tied model is not 32 by default")
    return wrong


def refusals(scratch):
    """Changes of a good release, each with a part of the message that must refuse it."""
    good = scratch / "release-1"

    def changed(name, change):
        folder = scratch / name
        folder.mkdir()
        for path in good.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        change(folder)
        return folder

    def weights(change):
        def to(folder):
            part = torch.load(folder / "consolidated.01.pth", weights_only=True)
            change(part)
            torch.save(part, folder / "consolidated.01.pth")

        return to

    cut = {
        "a part that is missing": (lambda f: (f / "consolidated.00.pth").unlink(), "without a gap"),
        "no weights": (lambda f: [p.unlink() for p in f.glob("*.pth")], "no consolidated"),
        "a part that is cut off": (
            lambda f: (f / "consolidated.01.pth").write_bytes((f / "consolidated.01.pth").read_bytes()[:-5000]),
            "consolidated.01.pth cannot be read",
        ),
        "a tensor that is missing": (
            weights(lambda p: p.pop("layers.1.attention.wo.weight")),
            "layers.1.attention.wo.weight",
        ),
        "a surplus tensor": (weights(lambda p: p.update({"lora": torch.zeros(1)})), "lora"),
        "a part of another shape": (
            weights(lambda p: p.update({"layers.0.attention.wk.weight": torch.zeros(16, 128)})),
            "layers.0.attention.wk.weight",
        ),
        "a part of another dtype": (
            weights(lambda p: p.update({"norm.weight": p["norm.weight"].half()})),
            "norm.weight in part 1 is torch.float16",
        ),
        "params.json of Llama 2": (
            lambda f: (f / "params.json").write_text(
                '{"dim": 128, "n_layers": 3, "n_heads": 8, "norm_eps": 1e-5, "vocab_size": -1}'
            ),
            "rope_theta",
        ),
        "params.json that is none": (lambda f: (f / "params.json").write_text("hello"), "params.json"),
        "another number of layers": (
            lambda f: (f / "params.json").write_text(
                (f / "params.json").read_text().replace('"n_layers": 3', '"n_layers": 2')
            ),
            "layers.2.",
        ),
        "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(), "tokenizer.model"),
        "the tokenizer of another model": (
            lambda f: (f / "tokenizer.model").write_bytes(b"SentencePiece"),
            "is not the tokenizer of Llama 3",
        ),
    }
    wrong = []
    for i, (name, (change, pattern)) in enumerate(cut.items()):
        out = scratch / "refused" / str(i)
        made = convert(changed(f"changed-{i}", change), out)
        if (
            made.returncode == 0
            or not made.stderr.startswith("error: ")
            or len(made.stderr.splitlines()) != 1
            or pattern not in made.stderr
            or out.exists()
        ):
            wrong.append(
                f"{name}: expected one line with '{pattern}', got {made.stderr.strip()[-300:] or made.stdout.strip()}"
            )
    existing = convert(good, scratch / "converted-1")
    if "exists already" not in existing.stderr:
        wrong.append(f"a folder that exists: {existing.stderr.strip()}")
    print(f"{len(cut) + 1} refusals, {len(wrong)} wrong")
    return wrong


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--program", type=Path, default=TOP / "build" / "cpu-fp32" / "eval_llama3")
    args = args.parse_args()
    if not args.program.is_file():
        sys.exit(f"error: {args.program} is no file; run: make PRECISION=fp32")
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        wrong = compare(Path(scratch), args.program, meta_model())
        wrong += refusals(Path(scratch))
    if wrong:
        sys.exit("error: " + "; ".join(wrong))
    print("all within bounds")


if __name__ == "__main__":
    main()
