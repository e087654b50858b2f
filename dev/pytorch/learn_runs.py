"""learn_runs.py: the training runs that learn.py compares, each done once and then read from its file.

A Setting says what all contestants have in common: text, model, batch, schedule, seed. The program trains first, from
weights that it initialized and saved; it records the windows of each step (samples.jsonl). PyTorch's
contestants train from the same weights on the same windows. A caller may rely on: a run's file under WORK/runs is
complete, so an interrupted command repeats at most one run.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import resource
import shutil
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy
import reference
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

TOP = Path(__file__).resolve().parents[2]
HEADER = {1: 64, 2: 192}  # bytes of a token file before its tokens, by its version
SPECIAL = 256  # the byte-level vocabulary: ids from 256 on have no text


@dataclass(frozen=True)
class Setting:
    text: Path  # folder with train.tok and val.tok
    model: dict  # config.json's sizes
    steps: int
    seed: int = 1  # of the initial weights and of the order of windows
    lr: float = 3e-4
    min_lr: float = 3e-5
    warmup: int = 40
    batch: int = 4  # windows a step
    seq: int = 128  # tokens a window
    weight_decay: float = 0.1
    beta2: float = 0.95
    clip: float = 1.0
    val_every: int = 0  # 0: only after the last step
    val_batches: int = 50  # of `batch` windows; 0: the whole text


@dataclass
class Runs:
    """Where runs are kept and how they are made."""

    work: Path
    threads: int = 1
    made: list = field(default_factory=list)  # specifications of the runs that a command used

    def get(self, name, setting, make, **details):
        """The result of a run: from its file, or by make()."""
        spec = asdict(setting) | details | {"text": str(setting.text), "contestant": name, "threads": self.threads}
        key = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:10]
        path = self.work / "runs" / f"{setting.text.name}-{name}-lr{setting.lr:g}-seed{setting.seed}-{key}.json"
        if not path.is_file():
            print(f"training: {path.stem}", flush=True)
            result = make() | {"spec": spec}
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(result))
            partial.rename(path)
        result = json.loads(path.read_text())
        self.made.append(result)
        return result


# ---------------------------------------------------------------------------
# processes


def run(command, log, cwd=TOP, env=None):
    """Runs a command, whose output goes to the file `log`. Returns the CPU time that it used, in seconds."""
    command = [str(c) for c in command]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as out:
        code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=env).returncode
    if code:
        end = " ".join(log.read_text(errors="replace").strip().splitlines()[-3:])
        sys.exit(f"error: '{' '.join(command)}' ended with exit code {code}: {end}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


# ---------------------------------------------------------------------------
# models and texts


def llama(C, L, NH, NKV, FF, V, HD=None, theta=500000.0, eps=1e-5, tied=False, positions=2048):
    """A configuration in the names of config.json."""
    return dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_act="silu",
        vocab_size=V,
        hidden_size=C,
        intermediate_size=FF,
        num_hidden_layers=L,
        num_attention_heads=NH,
        num_key_value_heads=NKV,
        head_dim=HD or C // NH,
        max_position_embeddings=positions,
        rms_norm_eps=eps,
        rope_theta=theta,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )


TINY = llama(C=256, L=6, NH=4, NKV=2, FF=768, V=4096)  # the program's preset of this name


def parameters(model):
    """The number of parameters, and of those that are not embedding or head."""
    c = model
    attention = 2 * c["hidden_size"] * c["head_dim"] * (c["num_attention_heads"] + c["num_key_value_heads"])
    block = attention + 3 * c["hidden_size"] * c["intermediate_size"] + 2 * c["hidden_size"]
    inner = c["num_hidden_layers"] * block + c["hidden_size"]
    return inner + (1 if c["tie_word_embeddings"] else 2) * c["vocab_size"] * c["hidden_size"], inner


def tokens(path):
    """The ids of a token file, (count), int64."""
    header = path.open("rb").read(64)
    if header[:8] != b"LLM3TOK1":
        sys.exit(f"error: {path} is not a token file; make it with dev/data/text.sh")
    version, width = struct.unpack_from("<II", header, 8)
    return torch.from_numpy(numpy.fromfile(path, dtype=f"<u{width}", offset=HEADER[version]).astype(numpy.int64))


def write_token_file(path, ids, vocabulary):
    """A token file without a tokenizer: (count) ids below `vocabulary`."""
    header = b"LLM3TOK1" + struct.pack("<IIIIQ", 1, 2, vocabulary, 0, len(ids)) + bytes(32)
    path.write_bytes(header + numpy.asarray(ids, dtype="<u2").tobytes())


def windows_of(ids, indices, T):
    """(len(indices), T + 1): inputs, and the targets one position later."""
    return torch.stack([ids[i * T : i * T + T + 1] for i in indices])


def held_out(setting):
    """The first windows of the validation text, in batches: (batches, batch, T + 1)."""
    ids = tokens(setting.text / "val.tok")
    batches = (len(ids) - 1) // setting.seq // setting.batch
    batches = min(batches, setting.val_batches or batches)
    if not batches:
        sys.exit(
            f"error: {setting.text}/val.tok has {len(ids)} tokens, fewer than one batch of {setting.batch} windows"
        )
    windows = windows_of(ids, range(batches * setting.batch), setting.seq)
    return windows.view(batches, setting.batch, -1)


def start_weights(runs, setting, program):
    """The folder of the weights that everyone starts from: the program's initialization, saved after one step with a
    learning rate of 0, which changes nothing."""
    key = hashlib.sha256(json.dumps(setting.model, sort_keys=True).encode()).hexdigest()[:10]
    model, start = runs.work / "models" / key, runs.work / "start" / f"{key}-seed{setting.seed}"
    if not (start / "config.json").is_file():
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(setting.model, indent=1))
        shutil.rmtree(start, ignore_errors=True)
        partial = start.with_name(start.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        command = [program, "--model", model, "--seed", setting.seed, "--out", partial, "--threads", runs.threads]
        command += ["--data", setting.text / "train.tok", "--seq", setting.seq, "--batch", 1, "--steps", 1, "--lr", 0]
        run(command, runs.work / "logs" / "start")
        (partial / "latest").resolve().rename(start)
        shutil.rmtree(partial)
    return start


# ---------------------------------------------------------------------------
# this program


def find_program(precision):
    program = TOP / "build" / f"cpu-{precision}" / "train_llama3"
    if not program.is_file():
        sys.exit(f"error: there is no {program}; build it: make PRECISION={precision} {program.relative_to(TOP)}")
    return program


def commit_of(program):
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return next((line for line in version.splitlines() if line), "unknown")


def ours(runs, setting, precision="fp32", ranks=1, optimizer=None):
    """Trains with the program, on `ranks` ranks that share each step's windows."""
    program = find_program(precision)
    if setting.batch % ranks:
        sys.exit(f"error: {setting.batch} windows a step cannot be shared by {ranks} ranks; change --batch")
    details = {"optimizer": optimizer} if optimizer else {}
    name = f"ours-{precision}-{ranks}" + (f"-{optimizer}" if optimizer else "")
    return runs.get(name, setting, lambda: train_ours(runs, setting, program, name, ranks, optimizer), **details)


def train_ours(runs, setting, program, name, ranks, optimizer):
    out = runs.work / "out" / f"{name}-{os.getpid()}"
    shutil.rmtree(out, ignore_errors=True)
    s = setting
    command = [program, "--model", start_weights(runs, s, find_program("fp32")), "--ranks", ranks, "--out", out]
    command += ["--data", s.text / "train.tok", "--seq", s.seq, "--batch", s.batch // ranks, "--seed", s.seed]
    command += ["--steps", s.steps, "--lr", repr(s.lr), "--min-lr", repr(s.min_lr), "--warmup", s.warmup]
    command += ["--weight-decay", s.weight_decay, "--beta2", s.beta2, "--clip", s.clip, "--threads", runs.threads]
    batches = len(held_out(s)) if s.val_batches else 0
    command += ["--val", s.text / "val.tok", "--val-batches", batches, "--val-every", s.val_every]
    command += ["--optimizer", optimizer] if optimizer else []
    cpu_seconds = run(command, runs.work / "logs" / name)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    vals = [line for line in lines if "val_loss" in line]
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    shutil.rmtree(out)
    return dict(
        losses=[line["loss"] for line in steps],
        norms=[line["grad_norm"] for line in steps],
        lrs=[line["lr"] for line in steps],
        val=[[line["step"], line["val_loss"]] for line in vals],
        cpu_seconds=cpu_seconds,
        samples=[line["samples"] for line in samples if "samples" in line],
        made_by=commit_of(program),
    )


# ---------------------------------------------------------------------------
# PyTorch


def open_transformers(start):
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32).train()
    return model, lambda ids: model(ids, use_cache=False).logits


def open_litgpt(start):
    """litgpt's model, with its own conversion of Hugging Face's names."""
    from litgpt import GPT, Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama

    c = json.loads((start / "config.json").read_text())
    config = Config(
        name="learn",
        block_size=c["max_position_embeddings"],
        vocab_size=c["vocab_size"],
        padded_vocab_size=c["vocab_size"],
        n_layer=c["num_hidden_layers"],
        n_head=c["num_attention_heads"],
        n_query_groups=c["num_key_value_heads"],
        n_embd=c["hidden_size"],
        head_size=c["head_dim"],
        intermediate_size=c["intermediate_size"],
        rope_base=int(reference.Config.from_json(start / "config.json").rope_theta),
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=c["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    weights = {}
    copy_weights_hf_llama(config, {}, weights, load_file(start / "model.safetensors"))
    model = GPT(config)
    model.load_state_dict(weights)
    return model.train(), model


def open_exact(start):
    """reference.py in double precision, next to which the rounding errors of all others are seen."""
    model = reference.load(start, torch.float64)
    return model.train(), model


LIBRARIES = {"transformers": open_transformers, "litgpt": open_litgpt, "exact": open_exact}


def learning_rate(setting, step):
    """Linear warm-up, then a cosine to the minimum at the last step; `step` counts from 1."""
    if step <= setting.warmup:
        return setting.lr * step / setting.warmup
    progress = (step - setting.warmup) / max(1, setting.steps - setting.warmup)
    return setting.min_lr + 0.5 * (1 + math.cos(math.pi * progress)) * (setting.lr - setting.min_lr)


# Mistakes that the comparison must detect, made on PyTorch's side. Several are defaults of PyTorch or transformers.
CHANGES = {
    "no clipping": dict(clip=1e30),
    "beta2 0.999 instead of 0.95": dict(beta2=0.999),
    "weight decay 0.01 instead of 0.1": dict(weight_decay=0.01),
    "weight decay also on norms": dict(decay_norms=True),
    "the schedule is one step late": dict(late=1),
    "RoPE's theta is 10,000 instead of 500,000": dict(theta=10000.0),
    "the norms' epsilon is 1e-6 instead of 1e-5": dict(norm_eps=1e-6),
    "steps 11 and 12 train on each other's windows": dict(swap=10),
}


def pytorch(runs, setting, library, samples, autocast=False, parts=1, change=None, stop=None, fp32_norm=False):
    """Trains with PyTorch on the windows `samples` of each step. autocast: in bf16; parts: micro-batches; change: one
    of CHANGES; stop: end after so many steps of the setting's; fp32_norm: clips by clip_grad_norm_ alone."""
    name = library + ("-bf16" if autocast else "") + (f"-parts{parts}" if parts > 1 else "")
    name += "-fp32-norm" if fp32_norm else ""
    details = {}
    if change:
        name += "-changed"
        details = {"change": change, "changes": CHANGES[change]}
    if stop:
        details["stop"] = stop
    how = PyTorchRun(library, autocast, parts, change, stop or setting.steps, fp32_norm)
    return runs.get(name, setting, lambda: train_pytorch(runs, setting, samples, how), **details)


@dataclass(frozen=True)
class PyTorchRun:
    library: str
    autocast: bool  # bf16 by torch.autocast
    parts: int  # micro-batches
    change: str | None
    steps: int
    fp32_norm: bool


def changed_start(runs, start, change):
    """The weights' folder, with another config.json if the change is one of the model."""
    keys = {"theta": "rope_theta", "norm_eps": "rms_norm_eps"}
    wanted = {keys[k]: v for k, v in CHANGES[change].items() if k in keys} if change else {}
    if not wanted:
        return start
    folder = runs.work / "start" / f"changed-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in wanted.items():
        where = config["rope_parameters"] if key not in config and "rope_parameters" in config else config
        where[key] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adamw(model, setting, change):
    optimizer = reference.adamw(
        model,
        lr=setting.lr,
        betas=(0.9, change.get("beta2", setting.beta2)),
        eps=1e-8,
        weight_decay=change.get("weight_decay", setting.weight_decay),
    )
    if change.get("decay_norms"):
        optimizer.param_groups[1]["weight_decay"] = setting.weight_decay
    return optimizer


def mean_loss(logits, targets):
    return F.cross_entropy(reference.wide(logits).flatten(0, 1), targets.flatten())


def clip(model, largest, fp32_norm):
    """clip_grad_norm_, but with squares summed in double precision: on a CPU it sums in fp32, and the norm of tiny's
    first gradient comes out as 7.570123 instead of 7.570171, and every later step depends on it."""
    if fp32_norm:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm)
    return norm


def train_pytorch(runs, setting, samples, how):
    torch.set_num_threads(runs.threads)
    start = start_weights(runs, setting, find_program("fp32"))
    torch.manual_seed(setting.seed)
    model, logits_of = LIBRARIES[how.library](changed_start(runs, start, how.change))
    modified = CHANGES[how.change] if how.change else {}
    optimizer = adamw(model, setting, modified)
    ids = tokens(setting.text / "train.tok")
    samples = [list(windows) for windows in samples]
    if "swap" in modified:
        i = modified["swap"]
        samples[i], samples[i + 1] = samples[i + 1], samples[i]
    losses, norms, lrs, val = [], [], [], []
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=how.autocast)
    for step in range(1, how.steps + 1):
        lr = learning_rate(setting, max(1, step - modified.get("late", 0)))
        for group in optimizer.param_groups:
            group["lr"] = lr
        windows = windows_of(ids, samples[step - 1], setting.seq)
        optimizer.zero_grad()
        total = 0.0
        for part in windows.chunk(how.parts):
            with cast:
                loss = mean_loss(logits_of(part[:, :-1]), part[:, 1:]) * (len(part) / len(windows))
            loss.backward()
            total += loss.item()
        norm = clip(model, modified.get("clip", setting.clip), how.fp32_norm)
        optimizer.step()
        losses.append(total)
        norms.append(norm.item())
        lrs.append(lr)
        if step == setting.steps or (setting.val_every and step % setting.val_every == 0):
            val.append([step, validate(model, logits_of, setting, cast)])
    return dict(
        losses=losses,
        norms=norms,
        lrs=lrs,
        val=val,
        made_by=made_by(how.library),
    )


def made_by(library):
    names = ["torch"] + ([library] if library != "exact" else [])
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def validate(model, logits_of, setting, cast):
    """The mean loss of the held-out windows."""
    model.eval()
    with torch.no_grad(), cast:
        losses = [mean_loss(logits_of(w[:, :-1]), w[:, 1:]).double().item() for w in held_out(setting)]
    model.train()
    return sum(losses) / len(losses)
