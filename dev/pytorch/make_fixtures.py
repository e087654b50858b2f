"""make_fixtures.py: checks reference.py against transformers and writes what the C tests compare with.

    python make_fixtures.py                 all cases into ../test/fixtures
    python make_fixtures.py base tied       some of them
    python make_fixtures.py --out DIR       elsewhere

A case is a directory: config.json and model.safetensors (so that it can be given as --model DIR) and
expected.safetensors (names and shapes: see `expected()` and README.md). Nothing is written for a case unless
transformers' LlamaForCausalLM, loading the same directory, agrees in loss, logits, every gradient and ten steps.
"""
import argparse
import copy
import dataclasses
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from reference import IGNORE, Config, Llama, adamw, hidden_keys, load, loss_sum, z_loss_sum

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import LlamaForCausalLM  # noqa: E402  (after the environment: nothing is fetched)
from transformers.utils import logging  # noqa: E402

TOLERANCE = 1e-5      # reference against transformers, ||delta|| / ||theirs||, both in fp32
TEETH = 1e-3          # what a case tests must change some gradient by more than this, 100 times the tolerance
SIZE_LIMIT = 5_000_000  # bytes, all fixtures together: they are committed
STEPS, CLIP = 10, 1.0

LLAMA31 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=8192)

# C, FF, L, NH, NKV, V: the model; HD only if config.json is to name head_dim; B, T: the batch.
# `ignored`: share of targets that are IGNORE. `std`: of the matrices, `small` of those before the residual stream.
# `teeth`: Config fields as a wrong program would read them; the gradients must differ then.
# `saved`: config.json as transformers 5 saves it (rope_parameters), otherwise as on the Hub (rope_theta, rope_scaling).
CASES = {
    "base": dict(C=64, FF=72, L=2, NH=4, NKV=2, V=256, B=2, T=32, teeth=dict(rope_theta=10000.0)),
    "tied": dict(C=32, FF=48, L=2, NH=4, NKV=2, V=128, B=2, T=24, tied=True, ignored=0.25, std=0.15, final=True),
    "llama31": dict(C=32, FF=48, L=2, NH=4, NKV=1, V=96, B=2, T=64, scaling=LLAMA31, std=0.25,
                    teeth=dict(rope_scaling=None)),
    "llama31_short": dict(C=32, FF=48, L=1, NH=2, NKV=2, V=96, B=2, T=64, std=0.25, ignored=0.25, saved=True,
                          scaling=dict(LLAMA31, original_max_position_embeddings=32),
                          teeth=dict(rope_scaling=None)),
    "llama32": dict(C=32, FF=48, L=1, NH=4, NKV=2, HD=8, V=96, B=2, T=64, tied=True, std=0.25,
                    scaling=dict(LLAMA31, factor=32.0), teeth=dict(rope_scaling=LLAMA31)),
    "odd": dict(C=42, FF=77, L=2, NH=3, NKV=1, HD=14, V=131, B=3, T=37, ignored=0.3),
    "one_token": dict(C=32, FF=48, L=1, NH=4, NKV=2, V=64, B=1, T=1, saved=True),
    "one_head": dict(C=32, FF=48, L=1, NH=1, NKV=1, V=64, B=2, T=16, std=0.15, final=True),
    "headdim": dict(C=40, FF=56, L=1, NH=4, NKV=1, HD=24, V=80, B=2, T=20, saved=True),
    "eps": dict(C=32, FF=48, L=1, NH=4, NKV=2, V=64, B=2, T=16, eps=1e-3, std=0.15, small=0.02,
                teeth=dict(rms_norm_eps=1e-5)),
    "longer": dict(C=24, FF=40, L=1, NH=6, NKV=2, HD=64, V=64, B=1, T=200, std=0.15),
    "headdim128": dict(C=16, FF=24, L=1, NH=2, NKV=1, HD=128, V=64, B=2, T=77, std=0.15),
    "documents": dict(C=16, FF=24, L=2, NH=4, NKV=2, HD=8, V=48, B=4, T=37, std=0.25, document_end=2,
                      teeth=dict(document_end=None)),
    "z_loss": dict(C=16, FF=24, L=1, NH=2, NKV=1, V=77, B=2, T=24, ignored=0.25, std=0.2, z_loss=0.05,
                   teeth=dict(z_loss=0.0)),
}


# ---------------------------------------------------------------------------
# inputs: configuration, weights, batch

def config_json(c):
    """As in the published Llama 3 repositories; head_dim appears only in 3.2's, and eos_token_id can be a list."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
        "eos_token_id": [1, 2] if c.get("scaling") else 1, "hidden_act": "silu", "hidden_size": c["C"],
        "initializer_range": 0.02, "intermediate_size": c["FF"],
        "max_position_embeddings": 131072 if c.get("scaling") else 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": c["NH"], "num_hidden_layers": c["L"], "num_key_value_heads": c["NKV"],
        "pretraining_tp": 1, "rms_norm_eps": c.get("eps", 1e-5), "rope_scaling": c.get("scaling"),
        "rope_theta": 500000.0, "tie_word_embeddings": c.get("tied", False), "torch_dtype": "float32",
        "transformers_version": "4.45.0", "use_cache": True, "vocab_size": c["V"],
    }
    if "HD" in c:
        config["head_dim"] = c["HD"]
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def draw_weights(config, c, rng):
    """Larger than a usual initialization, so that attention is far from uniform and no gradient is tiny."""
    weights = {}
    for name, p in Llama(config).state_dict().items():
        noise = torch.randn(p.shape, generator=rng)
        if p.dim() == 1:
            weights[name] = 1.0 + 0.1 * noise
        else:
            writes_residual = any(part in name for part in ("embed_tokens", "o_proj", "down_proj"))
            weights[name] = noise * (c["small"] if writes_residual and "small" in c else c.get("std", 0.1))
    return weights


def draw_batch(c, rng):
    """input_ids and targets, (B, T) each; the first and last id of the vocabulary always occur."""
    shape, V = (c["B"], c["T"]), c["V"]
    ids, targets = torch.randint(V, shape, generator=rng), torch.randint(V, shape, generator=rng)
    ids[0, 0], targets[0, -1] = V - 1, V - 1
    ids[-1, -1], targets[-1, 0] = (0, 0) if ids.numel() > 1 else (V - 1, V - 1)
    if "ignored" in c:
        targets[torch.rand(shape, generator=rng) < c["ignored"]] = IGNORE
        if c["B"] > 2:
            targets[1] = IGNORE  # a whole sequence without a target
    if "document_end" in c:
        end = c["document_end"]
        ids[ids == end] = end + 1
        ids[0] = end                        # a document a token; the second row is one document
        ids[2, 0] = ids[2, -1] = end        # of one token, of all others
        ids[3, [7, 8, 20, -2]] = end        # one without text, one of the last token
    return ids, targets


# ---------------------------------------------------------------------------
# measurements: `logits_of` hides whether the model is ours or transformers'

def logits_of(model, ids):
    return model(ids) if isinstance(model, Llama) else model(ids, attention_mask=mask_of(model, ids)).logits


def mask_of(theirs, ids):
    """What transformers adds to the scores (B, 1, T, T) with a document mask; None: its own causal mask."""
    if theirs.document_end is None:
        return None
    hidden = hidden_keys(ids, theirs.document_end)
    return torch.zeros((), dtype=theirs.dtype).masked_fill(hidden, torch.finfo(theirs.dtype).min)


def z_weight(model):
    return model.config.z_loss if isinstance(model, Llama) else model.z_loss


def objective(model, logits, targets):
    """What is minimized, the mean loss alone, and the mean z-loss."""
    total, count = loss_sum(logits, targets)
    if not z_weight(model):
        return total / count, total / count, torch.zeros_like(total)
    z_loss = z_weight(model) * z_loss_sum(logits, targets)
    return (total + z_loss) / count, total / count, z_loss / count


def gradients(model, ids, targets):
    """logits (B, T, V), mean loss () without z-loss, and {name: its gradient}, with z-loss."""
    model.zero_grad()
    logits = logits_of(model, ids)
    minimized, loss, _ = objective(model, logits, targets)
    minimized.backward()
    return logits.detach(), loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


def train(model, ids, targets):
    """STEPS steps of AdamW on one batch: losses and z-losses (2, STEPS) before each update, gradient norms before
    clipping, final weights."""
    model = copy.deepcopy(model)
    optimizer, losses, norms = adamw(model), [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        minimized, *both = objective(model, logits_of(model, ids), targets)
        minimized.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).detach())
        losses.append(torch.stack(both).detach())
        optimizer.step()
    return torch.stack(losses, 1), torch.stack(norms), {n: p.detach() for n, p in model.named_parameters()}


def error(x, reference):
    """||x - reference|| / ||reference||, or ||x|| if the reference is zero."""
    x, reference = x.double(), reference.double()
    norm = reference.norm()
    return ((x - reference).norm() / (norm if norm > 0 else 1.0)).item()


def worst(xs, references):
    """The largest error over tensors, and its name."""
    return max((error(xs[n], references[n]), n) for n in references)


def short(name):
    return name.replace("model.", "").replace("layers.", "").replace(".weight", "").replace("self_attn.", "")


def expected(model, ids, targets, keep_final):
    """The tensors of expected.safetensors, and figures about them to print."""
    logits, loss, grads = gradients(model, ids, targets)
    losses, norms, final = train(model, ids, targets)
    out = {"input_ids": ids.int(), "targets": targets.int(), "logits": logits, "loss": loss.reshape(1),
           "step_losses": losses[0].clone(), "step_norms": norms}
    if z_weight(model):
        out |= {"z_loss": torch.tensor([z_weight(model)]), "step_z_losses": losses[1].clone()}
    out |= {f"grad.{n}": g for n, g in grads.items()}
    if keep_final:
        out |= {f"final.{n}": w for n, w in final.items()}

    # bf16 as FSDP's mixed precision runs it, against fp32 at the same rounded weights
    low = copy.deepcopy(model).bfloat16()
    _, low_loss, low_grads = gradients(low, ids, targets)
    rounded = copy.deepcopy(low).float()
    _, ref_loss, ref_grads = gradients(rounded, ids, targets)
    out |= {"bf16.loss": low_loss.float().reshape(1), "bf16.ref_loss": ref_loss.reshape(1)}
    out |= {f"bf16.grad_error.{n}": torch.tensor([error(low_grads[n], g)]) for n, g in ref_grads.items()}
    out |= {f"bf16.ref_grad.{n}": g for n, g in ref_grads.items()}

    # how far fp32 itself is from the exact result: no test can ask for less
    exact = copy.deepcopy(model).double()
    logits64, _, grads64 = gradients(exact, ids, targets)
    losses64, norms64, final64 = train(exact, ids, targets)
    figures = {"fp64": (error(logits, logits64), *worst(grads, grads64)),
               "fp64_steps": (error(losses, losses64), error(norms, norms64), *worst(final, final64)),
               "bf16": (*worst(low_grads, ref_grads), error(low_loss, ref_loss)),
               "rounded": (rounded.state_dict(), ref_grads)}
    return {n: t.detach().contiguous() for n, t in out.items()}, figures


# ---------------------------------------------------------------------------
# one case

def check(name, what, value, bound):
    if not value <= bound:  # also catches NaN
        sys.exit(f"error: case {name}: {what}: reference.py and transformers differ by {value:.3e}, "
                 f"expected at most {bound:.0e}; nothing written for this case")
    return value


def make_case(name, c, seed, directory):
    rng = torch.Generator().manual_seed(seed)
    (directory / "config.json").write_text(config_json(c))
    config = Config.from_json(directory / "config.json")
    weights = draw_weights(config, c, rng)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    ids, targets = draw_batch(c, rng)

    theirs, info = LlamaForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32,
                                                    output_loading_info=True)
    if any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        sys.exit(f"error: case {name}: transformers does not find the weights it expects: {info}")
    if c.get("saved"):
        theirs.config.save_pretrained(directory)  # `ours` reads this spelling, so the comparison covers it
    ours = load(directory)
    ours.config.document_end = theirs.document_end = c.get("document_end")
    ours.config.z_loss = theirs.z_loss = c.get("z_loss", 0.0)

    # reference against transformers
    logits, loss, grads = gradients(ours, ids, targets)
    their_logits, their_loss, their_grads = gradients(theirs, ids, targets)
    if set(grads) != set(their_grads):
        sys.exit(f"error: case {name}: parameter names differ: {sorted(set(grads) ^ set(their_grads))}")
    # transformers' own cross-entropy
    own_loss = theirs(ids, attention_mask=mask_of(theirs, ids), labels=targets, shift_labels=targets).loss.detach()
    d_logits = check(name, "logits", error(logits, their_logits), TOLERANCE)
    d_loss = check(name, "loss", max(error(loss, their_loss), error(loss, own_loss)), TOLERANCE)
    d_grad, where = worst(grads, their_grads)
    check(name, f"gradient of {where}", d_grad, TOLERANCE)
    (losses, norms, _), (their_losses, their_norms, _) = train(ours, ids, targets), train(theirs, ids, targets)
    d_steps = check(name, f"losses and gradient norms of {STEPS} steps",
                    max(error(losses, their_losses), error(norms, their_norms)), TOLERANCE)

    # would this case detect the error that it is there for?
    bite = ""
    if "teeth" in c:
        wrong = Llama(dataclasses.replace(config, **c["teeth"]))
        wrong.load_state_dict(weights)
        moved, where_moved = worst(gradients(wrong, ids, targets)[2], grads)
        if moved < TEETH:
            sys.exit(f"error: case {name}: with {c['teeth']} no gradient moves by more than {moved:.1e}: "
                     f"the case tests nothing; enlarge its weights")
        bite = f"  teeth {moved:.0e} ({short(where_moved)})"

    tensors, figures = expected(ours, ids, targets, c.get("final", False))
    for n, t in tensors.items():
        if not torch.isfinite(t).all():
            sys.exit(f"error: case {name}: {n} is not finite")
    # one metadata entry only: safetensors writes several in an arbitrary order, and files would differ from run to run
    save_file(tensors, directory / "expected.safetensors", metadata={"format": "pt"})

    # what transformers' own bf16 (its RoPE tables are rounded to bf16, ours are not) would have given
    rounded, ref_grads = figures["rounded"]
    theirs.load_state_dict(rounded, strict=False)
    their_bf16 = worst(gradients(theirs.bfloat16(), ids, targets)[2], ref_grads)
    g64, steps64, bf16 = figures["fp64"], figures["fp64_steps"], figures["bf16"]
    size = sum(f.stat().st_size for f in directory.iterdir())
    count = sum(w.numel() for w in weights.values())
    print(f"{name:14s} {count:7,d} weights {size / 1024:6.0f} KiB  loss {loss:.6f}"
          f"  norms {norms[0]:.2f} to {norms[-1]:.2f}{bite}\n"
          f"    transformers  logits {d_logits:.1e}  loss {d_loss:.1e}  gradients {d_grad:.1e} ({short(where)})"
          f"  steps {d_steps:.1e}\n"
          f"    fp64          logits {g64[0]:.1e}  gradients {g64[1]:.1e} ({short(g64[2])})  step losses "
          f"{steps64[0]:.1e}  norms {steps64[1]:.1e}  final {steps64[2]:.1e} ({short(steps64[3])})\n"
          f"    bf16          gradients {bf16[0]:.1e} ({short(bf16[1])})  loss {bf16[2]:.1e}"
          f"  transformers' gradients {their_bf16[0]:.1e} ({short(their_bf16[1])})", flush=True)


def main():
    here = Path(__file__).resolve().parent
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("cases", nargs="*", help=f"of {' '.join(CASES)}; default all")
    args.add_argument("--out", type=Path, default=here.parent / "test" / "fixtures")
    args = args.parse_args()
    unknown = set(args.cases) - set(CASES)
    if unknown:
        sys.exit(f"error: no case {' '.join(sorted(unknown))}, expected some of {' '.join(CASES)}")
    torch.set_num_threads(1)  # the same bits each time on one machine
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    for seed, (name, c) in enumerate(CASES.items()):
        if args.cases and name not in args.cases:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            make_case(name, c, seed, Path(scratch))
            shutil.rmtree(args.out / name, ignore_errors=True)
            (args.out / name).mkdir(parents=True)
            for file in Path(scratch).iterdir():  # not copytree: the scratch folder's permissions are private
                (args.out / name / file.name).write_bytes(file.read_bytes())
    total = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: {total:,d} bytes in all, limit {SIZE_LIMIT:,d}")
    if total > SIZE_LIMIT:
        sys.exit("error: the fixtures are over their limit: shrink a case")


if __name__ == "__main__":
    main()
