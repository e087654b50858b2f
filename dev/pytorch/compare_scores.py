"""compare_scores.py: compares eval_llama3 --score with transformers on a model.

    make PRECISION=fp32
    python dev/pytorch/compare_scores.py MODEL TEXT [--requests 1000] [--tasks 500] [--out dev/results/scores.md]

MODEL is a Hugging Face directory. Requests are pieces of TEXT, a text file: a context and what follows it. A task is a
context with what follows it among four endings; the others come from elsewhere in the text, so that their sums are
larger, and their differences are bounded relative to the sum. Ids come from tokens_llama3 --encode: nothing but the
scores is compared. The sums of log-probabilities must agree within 1e-4, greedy and accuracy must be equal.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TOP = Path(__file__).resolve().parent.parent.parent
BUILD = TOP / "build" / "cpu-fp32"
BOUND = 1e-4
RELATIVE_BOUND = 1e-5


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True)
    if done.returncode:
        sys.exit(f"error: {' '.join(map(str, command))}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout.decode()


def encode(model, text):
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(text)
        file.flush()
        command = [BUILD / "tokens_llama3", "--tokenizer", Path(model) / "tokenizer.model", "--encode", file.name]
        return [int(line) for line in run(*command).split()]


def score(model, ids, scored):
    """The sum of log-probabilities of the last `scored` ids, and whether each is the most probable one."""
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, -scored:].double()
    targets = torch.tensor(ids[-scored:])
    logprobs = logits.log_softmax(-1)[torch.arange(scored), targets]
    return logprobs.sum().item(), bool((logits.argmax(-1) == targets).all())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tasks", type=int, default=500)
    parser.add_argument("--ranks", default="1")
    parser.add_argument("--out")
    options = parser.parse_args()
    draw = random.Random(1)
    torch.manual_seed(1)
    ids = encode(options.model, Path(options.text).read_text()[:1_000_000])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()

    def piece(most):
        at = draw.randrange(len(ids) - 80)
        return ids[at : at + draw.randint(1, most)]

    pairs = []
    for _ in range(options.requests):
        at, length = draw.randrange(len(ids) - 80), draw.randint(1, 60)
        pairs.append((ids[at : at + length], ids[at + length : at + length + draw.randint(1, 12)]))
    tasks = []
    for _ in range(options.tasks):
        at, length = draw.randrange(len(ids) - 80), draw.randint(4, 40)
        context, right = ids[at : at + length], ids[at + length : at + length + draw.randint(2, 10)]
        endings, label = [piece(10) for _ in range(3)], draw.randrange(4)
        endings.insert(label, right)
        tasks.append((context, endings, label))
        pairs += [(context, ending) for ending in endings]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for context, continuation in pairs:
            file.write(json.dumps({"context_ids": context, "continuation_ids": continuation}) + "\n")
        file.flush()
        command = [BUILD / "eval_llama3", "--model", options.model, "--score", file.name, "--ranks", options.ranks]
        lines = run(*command).splitlines()
    ours = [json.loads(line) for line in lines]
    differences, relative, greedy, most_greedy = [], [], 0, 0
    theirs = []
    for (context, continuation), answer in zip(pairs, ours, strict=True):
        theirs.append(score(model, context + continuation, len(continuation)))
        difference = abs(theirs[-1][0] - answer["logprob"])
        differences.append(difference)
        relative.append(difference / max(1, abs(theirs[-1][0])))
        greedy += theirs[-1][1] != answer["greedy"]
        most_greedy += theirs[-1][1]

    def accuracy(sums):
        right, at = 0, options.requests
        for _, endings, label in tasks:
            of_task = sums[at : at + len(endings)]
            right += of_task.index(max(of_task)) == label
            at += len(endings)
        return right / len(tasks)

    of_ours, of_theirs = accuracy([a["logprob"] for a in ours]), accuracy([t[0] for t in theirs])
    of_text, of_tasks = max(differences[: options.requests]), max(relative[options.requests :])
    bound = f"<= {BOUND:g}"
    rows = [
        (f"largest difference of a sum, {options.requests} requests", f"{of_text:.2g}", bound, of_text <= BOUND),
        (
            f"largest difference relative to the sum, {len(pairs) - options.requests} endings of tasks",
            f"{of_tasks:.2g}",
            f"<= {RELATIVE_BOUND:g}",
            of_tasks <= RELATIVE_BOUND,
        ),
        ("greedy in one of the two only", f"{greedy} of {len(pairs)} ({most_greedy} greedy)", "0", greedy == 0),
        (f"accuracy on {len(tasks)} tasks", f"{of_ours:.3f}, {of_theirs:.3f}", "equal", of_ours == of_theirs),
    ]
    for what, figure, bound, good in rows:
        print(f"{'pass' if good else 'FAIL'} {what}: {figure}, expected {bound}")
    if options.out:
        commit = run("git", "-C", TOP, "rev-parse", "--short", "HEAD").strip()
        text = f"# --score and transformers\n\n`{' '.join(['python', *sys.argv])}`; commit {commit}; "
        text += f"fp32; {len(pairs)} requests.\n\n"
        text += "| what | measured | expected | met |\n|---|---|---|---|\n"
        text += "".join(f"| {w} | {f} | {b} | {'yes' if g else 'NO'} |\n" for w, f, b, g in rows)
        Path(options.out).write_text(text)
    sys.exit(not all(row[3] for row in rows))


if __name__ == "__main__":
    main()
