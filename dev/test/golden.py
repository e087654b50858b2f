#!/usr/bin/env python3
"""golden.py OLD NEW [REGEX]: compares two builds of this program that must train, write and print the same.

OLD and NEW are folders with build/cpu-fp32 (and, if both have them, build/cpu-bf16 and build/cuda-on-cpu-bf16), built
on this machine: the bits of oneDNN's matmuls differ between processors. Each case runs in both, and
everything that does not depend on time must be equal: losses and norms, checksums of checkpoints, ledger.json,
plan.json, generated texts, scores, exports. Then NEW resumes checkpoints of OLD. REGEX selects cases by name.
Prints `pass NAME` or `FAIL NAME: what differs`, and at the end `N passed, N failed`.
"""

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import field_files  # noqa: E402

OLD, NEW = (Path(folder).resolve() for folder in sys.argv[1:3])
WANTED = re.compile(sys.argv[3] if len(sys.argv) > 3 else "")
STEPS = 10
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "LC_ALL": "C"}
counts = {"pass": 0, "FAIL": 0}

# Options whose values are combined in pairs. The first value of each is the default.
OPTIONS = [
    ["--tp 1", "--tp 2"],
    ["--cp 1", "--cp 2"],
    ["--pp 1", "--pp 2", "--pp 2 --pp-schedule interleaved --pp-chunks 2", "--pp 2 --pp-light-ends"],
    ["--dp-shard 1", "--dp-shard 2", "--dp-shard 3"],
    ["--dp-replicate 1", "--dp-replicate 2"],
    ["--accum 4", "--accum 1", "--accum 2"],
    ["--batch 1", "--batch 2"],
    ["--sharding full_shard", "--sharding shard_grad_op", "--sharding no_shard"],
    ["--accumulate sharded", "--accumulate local"],
    ["--recompute none", "--recompute selective", "--recompute full", "--recompute every:2"],
    ["--wrap block", "--wrap size:30000"],
    ["--slots 2", "--slots 3"],
    ["--offload none", "--offload optimizer", "--offload all"],
    ["--reduce-dtype fp32", "--reduce-dtype bf16"],
    ["", "--deterministic"],
    ["", "--z-loss 0.05"],
    ["", "--optimizer muon"],
    ["", "--doc-mask"],
    ["", "--save-mode async"],
    ["--model untied", "--model tied", "--model untied --lora-rank 4 --base int8"],
]


def text_of(chosen):
    return " ".join(OPTIONS[option][value] for option, value in sorted(chosen.items()) if OPTIONS[option][value])


def ranks_of(layout):
    axes = ("tp", "cp", "pp", "dp-shard", "dp-replicate")
    return math.prod(int(size[1]) for axis in axes if (size := re.search(rf"--{axis} (\d+)", layout)))


def is_allowed(chosen):
    text = text_of(chosen)
    excluded = (("--lora", "muon"), ("--lora", "--tp 2"), ("interleaved", "--accum 1"))
    return ranks_of(text) <= 8 and not any(a in text and b in text for a, b in excluded)


def layouts():
    """Combinations of values, greedily chosen, in which each two values of different options occur together."""
    left = {((a, x), (b, y)) for a, b in itertools.combinations(range(len(OPTIONS)), 2)
            for x in range(len(OPTIONS[a])) for y in range(len(OPTIONS[b])) if is_allowed({a: x, b: y})}  # fmt: skip
    while left:
        chosen = dict(min(left))
        for option in range(len(OPTIONS)):
            if option in chosen:
                continue
            new = {value: sum(tuple(sorted(((option, value), pair))) in left for pair in chosen.items())
                   for value in range(len(OPTIONS[option])) if is_allowed(chosen | {option: value})}  # fmt: skip
            chosen[option] = max(new, key=new.get)
        left -= set(itertools.combinations(sorted(chosen.items()), 2))
        yield text_of(chosen)


# ---------------------------------------------------------------- running and comparing
def trainer(build):
    return f"{build}/train_llama3" + ("_cuda" if "cuda" in build else "")


def run(top, program, arguments, **files):
    """The exit code, and what is printed on both streams."""
    done = subprocess.run([top / "build" / program, *arguments.split()], capture_output=True, **files)
    return done.returncode, done.stdout, done.stderr


def without_times(value):
    """A JSON value without what depends on time."""
    if isinstance(value, dict):
        times = ("mfu", "matmul_share", "overlap", "slowest_rank")
        return {key: without_times(item) for key, item in value.items()
                if not key.endswith(("_s", "seconds")) and key not in times}  # fmt: skip
    return [without_times(item) for item in value] if isinstance(value, list) else value


def content(path):
    if path.name == "metrics.jsonl":
        return json.dumps([without_times(json.loads(line)) for line in path.read_text().splitlines()])
    if path.name in ("ledger.json", "plan.json"):
        return json.dumps(without_times(json.loads(path.read_text())))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def files(folder):
    skipped = {"run.html", "run-data.js", "config.txt", "lock", "latest", "layout.json"}
    return {str(path.relative_to(folder)): content(path) for path in sorted(Path(folder).rglob("*"))
            if path.is_file() and path.name not in skipped}  # fmt: skip


def report(name, differences):
    word = "FAIL" if differences else "pass"
    counts[word] += 1
    print(f"{word} {name}" + (f": {', '.join(differences)[:400]}" if differences else ""), flush=True)


def difference(a, b):
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


LENGTH = f"--seq 16 --steps {STEPS} --save-every 5"


def trains(build, name, options, length=LENGTH):
    """Trains in both builds."""
    if not WANTED.search(name):
        return
    results = []
    for top, out in ((OLD, "out-old"), (NEW, "out-new")):
        shutil.rmtree(out, ignore_errors=True)
        code, _, said = run(top, trainer(build), f"{options} {length} --out {out}")
        results.append((code, said if code else b"", files(out) if code == 0 else {}))
    (old_code, old_said, old), (new_code, new_said, new) = results
    if old_code == new_code == 1:
        print(f"refused by both: {name}: {old_said.decode().strip()[:150]}")
    elif old_code or new_code:
        report(name, [f"exit codes {old_code} and {new_code}: {(new_said or old_said).decode().strip()}"])
    else:
        report(name, difference(old, new))


# Tasks that another program may have taken over: what the trainer took in OLD, and what that program takes in NEW.
TASKS = {
    "generates": ("--generate abc --max-tokens 12 --temperature 0.7", "generate_llama3", "--prompt abc --max-tokens 12 "
                  "--temperature 0.7"),
    "answers prompts": ("--prompts prompts.jsonl", "generate_llama3", "--prompts prompts.jsonl"),
    "evaluates": ("--eval data.tok --seq 16", "eval_llama3", "--eval data.tok --seq 16"),
    "scores": ("--score requests.jsonl", "eval_llama3", "--score requests.jsonl"),
    "exports": ("--export exported", "convert_llama3", "--export exported"),
    "exports bf16": ("--export exported --dtype bf16", "convert_llama3", "--export exported --dtype bf16"),
    "writes GGUF": ("--export exported.gguf", "convert_llama3", "--export exported.gguf"),
}  # fmt: skip


def tasks(build, model):
    for name, (old_options, program, new_options) in TASKS.items():
        if not WANTED.search(f"{build}: {name}, {model}"):
            continue
        results = []
        for top in (OLD, NEW):
            shutil.rmtree("exported", ignore_errors=True)
            for path in [*Path().glob("exported*"), Path("Modelfile")]:
                path.unlink(missing_ok=True)
            is_new = (top / "build" / build / program).exists()
            taken = (program, new_options) if is_new else ("train_llama3", old_options)
            code, text, _ = run(top, f"{build}/{taken[0]}", f"--model {model} {taken[1]}")
            paths = [*Path().glob("exported*"), Path("Modelfile")]
            made = {path.name: content(path) for path in paths if path.is_file()}
            results.append({"exit code": code, "output": b"" if made or Path("exported").exists() else text} | made |
                           (files("exported") if Path("exported").exists() else {}))  # fmt: skip
        report(f"{build}: {name}, {model}", difference(*results))


# ---------------------------------------------------------------- models, data, cases
def prepare():
    config = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 4, "head_dim": 12, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
              "model_type": "llama", "hidden_act": "silu", "rope_theta": 10000.0}  # fmt: skip
    specials = ["<|begin_of_text|>", "<|end_of_text|>"]
    for name, tied in (("untied", False), ("tied", True)):
        folder = Path(name)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 258, "tie_word_embeddings": tied}))
        field_files.write_tokenizer(folder, specials, None, "{}")
    text = "".join(f"{n} times {m} is {n * m}.\n" for n in range(800) for m in range(6))
    for number in range(3):
        Path(f"text-{number}.txt").write_text(text[number * 25000 : number * 25000 + 25000])
    for name, sources in (("data", "text-0.txt text-1.txt"), ("more", "text-2.txt")):
        # NEW also writes the tokenizer's files next to the token files
        run(NEW, "cpu-fp32/tokens_llama3", f"--tokenizer untied/tokenizer.json --out-train {name}.tok --out-val "
            f"{name}-val.tok {sources}")  # fmt: skip
    Path("prompts.jsonl").write_text('{"id": 1, "prompt": "3 times"}\n{"prompt_ids": [70, 71], "seed": 5}\n')
    Path("requests.jsonl").write_text('{"id": 1, "context": "3 times 4 is", "continuation": " 12."}\n')
    Path("recipe.json").write_text(json.dumps({"stages": [
        {"tokens": 96, "batch": 2, "seq": 16, "lr": 0.001, "data": {"data.tok": 1}},
        {"tokens": 384, "batch": 4, "seq": 16, "lr": 0.0005, "data": {"data.tok": 3, "more.tok": 1}}]}))  # fmt: skip


def main():
    builds = [b for b in ("cpu-fp32", "cpu-bf16", "cuda-on-cpu-bf16")
              if all((top / "build" / b / ("train_llama3" + "_cuda" * b.startswith("cuda"))).exists()
                     for top in (OLD, NEW))]  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        prepare()
        for build in builds:
            for layout in layouts():
                trains(build, f"{build}: {layout}", f"--data data.tok --ranks {ranks_of(layout)} {layout}")
            alone = "--model untied --batch 2"
            trains(build, f"{build}: a mixture", f"{alone} --data data.tok:2,more.tok:1 --ranks 2")
            trains(build, f"{build}: validation", f"{alone} --data data.tok --val data-val.tok --val-every 3")
            recipe = "--model untied --recipe recipe.json"
            trains(build, f"{build}: a recipe", recipe, "--save-every 5")
            for name, options, length in (("full", alone + " --data data.tok --ranks 2", LENGTH),
                                          ("tied, Muon", "--model tied --optimizer muon --data data.tok", LENGTH),
                                          ("mixture", alone + " --data data.tok:2,more.tok:1", LENGTH),
                                          ("recipe", recipe, "--save-every 5")):  # fmt: skip
                shutil.rmtree("first", ignore_errors=True)
                run(OLD, trainer(build), f"{options} {length} --out first")
                trains(build, f"{build}: resumes {name}", f"{options} --resume first/step-00000005", length)
            if "cuda" not in build:
                tasks(build, "first/step-00000005")
    print(f"{counts['pass']} passed, {counts['FAIL']} failed")
    sys.exit(counts["FAIL"] > 0)


main()
