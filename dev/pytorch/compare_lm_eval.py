"""compare_lm_eval.py: lm-evaluation-harness gets the same answers from this program as from transformers.

    make PRECISION=fp32
    python dev/pytorch/compare_lm_eval.py MODEL TEXT [--tasks 80] [--texts 8] [--out dev/results/lm-eval.md]

MODEL is a Hugging Face directory with a tokenizer that transformers reads, such as a checkpoint; TEXT has a sentence or
verse on each line. Two local task files are made of it: multiple-choice tasks, in which the end of a line stands among
the ends of three others, and texts to be continued. The harness evaluates them through lm_eval_adapter.py and through
its own model `hf` in fp32. Accuracy, the greedy flags and the generated texts must be equal.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent.parent
PROGRAM = TOP / "build" / "cpu-fp32" / "train_llama3"
CHOICES, TEXTS = "local_choices", "local_texts"


def halves(line):
    words = line.split()
    at = len(words) * 2 // 3
    return " ".join(words[:at]), " ".join(words[at:])


def write_tasks(folder, lines, tasks, texts):
    draw = random.Random(5)
    with open(folder / "choices.jsonl", "w") as f:
        for line in lines[:tasks]:
            context, end = halves(line)
            endings = [halves(other)[1] for other in draw.sample(lines, 3)] + [end]
            draw.shuffle(endings)
            f.write(json.dumps({"context": context, "endings": endings, "label": endings.index(end)}) + "\n")
    with open(folder / "texts.jsonl", "w") as f:
        for line in lines[:texts]:
            f.write(json.dumps({"context": halves(line)[0]}) + "\n")
    common = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{context}}"}
    choices = common | {
        "task": CHOICES,
        "dataset_kwargs": {"data_files": {"test": str(folder / "choices.jsonl")}},
        "output_type": "multiple_choice",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_bytes"}],
    }
    generated = common | {
        "task": TEXTS,
        "dataset_kwargs": {"data_files": {"test": str(folder / "texts.jsonl")}},
        "output_type": "generate_until",
        "doc_to_target": "",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in choices, generated:  # JSON is YAML
        (folder / f"{task['task']}.yaml").write_text(json.dumps(task))


def evaluate(folder, name, command):
    """Runs the harness; returns the lines that it logged for each task."""
    command = command + ["--include_path", folder, "--tasks", f"{CHOICES},{TEXTS}", "--log_samples"]
    done = subprocess.run([str(word) for word in command + ["--output_path", folder / name]], capture_output=True)
    if done.returncode:
        sys.exit(f"error: {name}: {done.stderr.decode(errors='replace').strip()[-2000:]}")
    samples = []
    for task in CHOICES, TEXTS:
        path = next((folder / name).rglob(f"samples_{task}_*.jsonl"))
        samples.append(sorted(map(json.loads, open(path)), key=lambda sample: sample["doc_id"]))
    return samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--tasks", type=int, default=80)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--out")
    args = parser.parse_args()
    lines = [line.strip() for line in open(args.text) if len(line.split()) > 14]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_tasks(folder, lines, args.tasks, args.texts)
        adapter = [sys.executable, TOP / "dev/pytorch/lm_eval_adapter.py", "run", "--model", "llama3_c"]
        ours = evaluate(folder, "ours", adapter + ["--model_args", f"model={args.model},program={PROGRAM}"])
        theirs = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--device", "cpu"]
        hf = evaluate(folder, "hf", theirs + ["--model_args", f"pretrained={args.model},dtype=float32"])
    pairs = list(zip(*(samples[0] for samples in (ours, hf))))
    answers = [(p, q) for a, b in pairs for p, q in zip(a["filtered_resps"], b["filtered_resps"])]
    furthest = max(abs(float(p[0]) - float(q[0])) / max(1, abs(float(q[0]))) for p, q in answers)
    greedy = sum(str(p[1]) != str(q[1]) for p, q in answers)
    accuracy = [
        [sum(sample[key] for sample in samples[0]) / len(samples[0]) for key in ("acc", "acc_bytes")]
        for samples in (ours, hf)
    ]
    texts = sum(a["filtered_resps"] == b["filtered_resps"] for a, b in zip(ours[1], hf[1]))
    rows = [
        ("multiple-choice tasks", f"{len(pairs)}, of {len(answers)} requests", ""),
        ("accuracy, accuracy per byte: program", "{:.4f}, {:.4f}".format(*accuracy[0]), ""),
        ("the same: transformers", "{:.4f}, {:.4f}".format(*accuracy[1]), "equal"),
        ("largest difference of a sum of log-probabilities, relative", f"{furthest:.1e}", "1e-4"),
        ("greedy flags that differ", str(greedy), "0"),
        ("generated texts that are equal", f"{texts} of {len(ours[1])}", "all"),
    ]
    table = "| | measured | bound |\n|---|---|---|\n" + "".join(f"| {a} | {b} | {c} |\n" for a, b, c in rows)
    print(table)
    if args.out:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=TOP)
        title = "# lm-evaluation-harness, through the program and through transformers\n\n"
        command = f"python dev/pytorch/compare_lm_eval.py {Path(args.model).name} {Path(args.text).name}"
        Path(args.out).write_text(f"{title}`{command}`; commit {commit.stdout.strip()}; fp32.\n\n{table}")
    if accuracy[0] != accuracy[1] or greedy or texts < len(ours[1]) or furthest > 1e-4:
        sys.exit("error: the answers differ")


if __name__ == "__main__":
    main()
