"""make_muon_fixture.py: three steps of Muon on a small model, for the C test "muon".

    python make_muon_fixture.py                 into ../test/fixtures/muon
    python make_muon_fixture.py --out DIR       elsewhere

Writes config.json, model.safetensors and expected.safetensors: random gradients, the factor by which the program scales
them, and the change of every weight in each step, computed in float64. The matrices of the block are
square (q, o), wide (k, v, down) and tall (gate, up), with sizes that nothing divides. Nothing is written unless
torch.optim.Muon with adjust_lr_fn="match_rms_adamw", whose Newton-Schulz iterations run in bf16, makes the same changes
within what bf16 allows, and exactly the same once these iterations run in float64. Everything else is AdamW's.
"""
import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.optim import _muon

from reference import Config, Llama

STEPS, SCALES = 3, (0.5, 1.0, 0.25)  # scales of the gradient differ: Muon does not see a common factor
LR, MOMENTUM, BETAS, EPS, WEIGHT_DECAY = 0.02, 0.95, (0.9, 0.95), 1e-8, 0.1
A, B, C, ITERATIONS, LEAST_NORM = 3.4445, -4.7750, 2.0315, 5, 1e-7
CONFIG = {"model_type": "llama", "hidden_size": 30, "num_hidden_layers": 1, "num_attention_heads": 3,
          "num_key_value_heads": 1, "head_dim": 10, "intermediate_size": 37, "vocab_size": 64,
          "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False}
BF16_TOLERANCE = 3e-2  # ||delta|| / ||theirs|| of a change whose iterations ran in bf16


def newton_schulz(u):
    """Keller Jordan's iterations in u's own dtype, on the transposed matrix if it is tall."""
    x = u.T if u.shape[0] > u.shape[1] else u
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def is_matrix_of_block(name, p):
    return p.dim() == 2 and ".layers." in name


def changes(weights, grads, dtype):
    """[{name: change}] for each step, by this script's own Muon and AdamW."""
    w = {n: p.to(dtype, copy=True) for n, p in weights.items()}
    m = {n: torch.zeros_like(p) for n, p in w.items()}
    v = {n: torch.zeros_like(p) for n, p in w.items()}
    out = []
    for step in range(STEPS):
        before = {n: p.clone() for n, p in w.items()}
        for n, p in w.items():
            g = grads[step][n].to(dtype) * SCALES[step]
            decay = WEIGHT_DECAY if p.dim() == 2 else 0.0
            p.mul_(1 - LR * decay)
            if is_matrix_of_block(n, p):
                m[n] = MOMENTUM * m[n] + (1 - MOMENTUM) * g
                u = (1 - MOMENTUM) * g + MOMENTUM * m[n]  # Nesterov
                p.sub_(LR * 0.2 * max(p.shape) ** 0.5 * newton_schulz(u))
            else:
                m[n] = BETAS[0] * m[n] + (1 - BETAS[0]) * g
                v[n] = BETAS[1] * v[n] + (1 - BETAS[1]) * g * g
                root = (v[n] / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS
                p.sub_(LR * m[n] / (1 - BETAS[0] ** (step + 1)) / root)
        out.append({n: p - before[n] for n, p in w.items()})
    return out


def torch_changes(weights, grads, dtype):
    """The same by torch.optim.Muon and torch.optim.AdamW."""
    w = {n: torch.nn.Parameter(p.to(dtype, copy=True)) for n, p in weights.items()}
    matrices = [p for n, p in w.items() if is_matrix_of_block(n, p)]
    others = [p for n, p in w.items() if not is_matrix_of_block(n, p)]
    decays = [{"params": [p for p in others if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in others if p.dim() == 1], "weight_decay": 0.0}]
    optimizers = [torch.optim.Muon(matrices, lr=LR, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM, nesterov=True,
                                   adjust_lr_fn="match_rms_adamw"),
                  torch.optim.AdamW(decays, lr=LR, betas=BETAS, eps=EPS)]
    out = []
    for step in range(STEPS):
        before = {n: p.detach().clone() for n, p in w.items()}
        for n, p in w.items():
            p.grad = grads[step][n].to(dtype) * SCALES[step]
        for optimizer in optimizers:
            optimizer.step()
        out.append({n: p.detach() - before[n] for n, p in w.items()})
    return out


def error(x, reference):
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def worst(xs, references, names):
    return max(error(x[n], r[n]) for x, r in zip(xs, references) for n in names)


def main():
    here = Path(__file__).resolve().parent
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, default=here.parent / "test" / "fixtures" / "muon")
    directory = args.parse_args().out
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    rng = torch.Generator().manual_seed(11)
    model = Llama(Config.from_json(directory / "config.json"))
    weights = {n: 0.1 * torch.randn(p.shape, generator=rng) for n, p in model.named_parameters()}
    grads = [{n: torch.randn(p.shape, generator=rng) for n, p in weights.items()} for _ in range(STEPS)]
    matrices = [n for n, p in weights.items() if is_matrix_of_block(n, p)]

    exact = changes(weights, grads, torch.float64)
    single = worst(changes(weights, grads, torch.float32), exact, weights)
    in_bf16 = torch_changes(weights, grads, torch.float32)
    of_bf16 = worst(in_bf16, exact, matrices)
    theirs = _muon._zeropower_via_newtonschulz
    _muon._zeropower_via_newtonschulz = lambda u, *rest: newton_schulz(u)
    same = worst(torch_changes(weights, grads, torch.float64), exact, weights)
    _muon._zeropower_via_newtonschulz = theirs
    print(f"largest relative difference of a change from float64: this script in fp32 {single:.1e}; torch.optim.Muon "
          f"{of_bf16:.1e} (bf16); with its iterations in float64, and AdamW, {same:.1e}")
    if not (of_bf16 <= BF16_TOLERANCE and same <= 1e-12):
        sys.exit(f"error: torch.optim.Muon differs: expected at most {BF16_TOLERANCE:.0e} in bf16 and 1e-12 in "
                 f"float64; nothing written")

    tensors = {"scales": torch.tensor(SCALES)}
    for step in range(STEPS):
        tensors |= {f"grad.{step + 1}.{n}": g for n, g in grads[step].items()}
        tensors |= {f"change.{step + 1}.{n}": c.float().contiguous() for n, c in exact[step].items()}
    for n in matrices:
        tensors[f"bf16.error.{n}"] = torch.tensor([max(error(x[n], r[n]) for x, r in zip(in_bf16, exact))])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, directory / "expected.safetensors", metadata={"format": "pt"})
    print(f"{sum(f.stat().st_size for f in directory.iterdir()) / 1024:.0f} KiB in {directory}")


if __name__ == "__main__":
    main()
