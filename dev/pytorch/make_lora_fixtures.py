"""make_lora_fixtures.py: adapters made by Hugging Face's PEFT for two of the fixture models, and how they train.

    python make_lora_fixtures.py [--out DIR]      needs peft; default ../test/fixtures

A case is a directory: adapter_config.json and adapter_model.safetensors as PEFT saves them (so it can be given as
--adapters DIR, with --model of its base) and expected.safetensors: batch, loss and logits, every adapter's gradient,
ten AdamW steps in fp32 and, as in make_fixtures.py, the errors of bf16. B is random, because with PEFT's initial
zeros A would have no gradient.
"""

import argparse
import copy
import json
import os
from pathlib import Path

os.environ.setdefault(
    "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"
)  # oneDNN's bf16 matmuls with AMX tiles fail for some of these shapes

import torch  # noqa: E402
from safetensors.torch import load_file, save_file

from make_fixtures import CLIP, STEPS, error
from reference import adamw, loss_sum

os.environ.setdefault("HF_HUB_OFFLINE", "1")
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES = {
    "lora_odd": dict(base="odd", r=5, lora_alpha=15, target_modules=ALL),
    "lora_tied": dict(base="tied", r=3, lora_alpha=4, target_modules=["q_proj", "v_proj", "down_proj"]),
}


def trained(model):
    """The parameters that are trained, under the names of adapter_model.safetensors."""
    return {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}


def gradients(model, ids, targets):
    model.zero_grad()
    logits = model(ids).logits
    total, count = loss_sum(logits, targets)
    (total / count).backward()
    return logits.detach(), (total / count).detach(), {n: p.grad.clone() for n, p in trained(model).items()}


def train(model, ids, targets):
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = adamw(model)
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        total, count = loss_sum(model(ids).logits, targets)
        (total / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, CLIP).detach())
        losses.append((total / count).detach())
        optimizer.step()
    return torch.stack(losses), torch.stack(norms), {n: p.detach() for n, p in trained(model).items()}


def make_case(name, case, seed, out):
    base, directory = out / case["base"], out / name
    torch.manual_seed(seed)
    batch = load_file(base / "expected.safetensors")
    ids, targets = batch["input_ids"].long(), batch["targets"].long()
    model = get_peft_model(
        LlamaForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32),
        LoraConfig(
            r=case["r"],
            lora_alpha=case["lora_alpha"],
            target_modules=case["target_modules"],
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        ),
    )
    for n, p in trained(model).items():
        if "lora_B" in n:
            torch.nn.init.normal_(p, std=0.1)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    (directory / "README.md").unlink(missing_ok=True)
    config = json.loads((directory / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None  # no paths of this machine
    config["target_modules"] = sorted(config["target_modules"])  # PEFT stores a set, in no fixed order
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    logits, loss, grads = gradients(model, ids, targets)
    losses, norms, final = train(model, ids, targets)
    tensors = {
        "input_ids": ids.int(),
        "targets": targets.int(),
        "logits": logits,
        "loss": loss.reshape(1),
        "step_losses": losses,
        "step_norms": norms,
    }
    tensors |= {f"grad.{n}": g for n, g in grads.items()} | {f"final.{n}": w for n, w in final.items()}
    low = copy.deepcopy(model).bfloat16()
    _, low_loss, low_grads = gradients(low, ids, targets)
    _, ref_loss, ref_grads = gradients(copy.deepcopy(low).float(), ids, targets)
    tensors |= {"bf16.loss": low_loss.float().reshape(1), "bf16.ref_loss": ref_loss.reshape(1)}
    tensors |= {f"bf16.grad_error.{n}": torch.tensor([error(low_grads[n], g)]) for n, g in ref_grads.items()}
    tensors |= {f"bf16.ref_grad.{n}": g for n, g in ref_grads.items()}
    save_file(
        {n: t.detach().float().contiguous() if t.is_floating_point() else t for n, t in tensors.items()},
        directory / "expected.safetensors",
        metadata={"format": "pt"},
    )
    print(
        f"{name}: {len(grads)} adapter tensors for {case['base']}, loss {loss:.6f}, norms {norms[0]:.2f} to "
        f"{norms[-1]:.2f}"
    )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "test" / "fixtures")
    args = args.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for seed, (name, case) in enumerate(CASES.items()):
        make_case(name, case, 100 + seed, args.out)


if __name__ == "__main__":
    main()
