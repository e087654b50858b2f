"""A layout for 64 GPUs, checked by plan_llama3: does it fit, and how fast is it next to the best that it finds?"""
import re
from functools import lru_cache

from answers import BadAnswer
from program import CLUSTER, Failure, command_line, plan, printed

MODEL = "--model llama3-70b --world 64"
FIXED = "--cp 1 --dp-replicate 1 --sharding full_shard --recompute none"
SEQUENCES, T, MARGIN = 256, 8192, 0.05
# --accum and --batch say how many sequences a step has: here 64 data ranks, 4 sequences each.
SEARCH = f"{MODEL} {FIXED} --batch 1 --accum {SEQUENCES // 64} --cluster {CLUSTER} --search"
CHOICES = ("--tp", "--pp", "--dp-shard", "--batch", "--accum", "--accumulate", "--pp-chunks", "--pp-schedule",
           "--pp-light-ends")


def facts():
    return {"model": MODEL, "fixed": FIXED, "cluster": CLUSTER}


def planned(options):
    return plan(f"{MODEL} {FIXED} {options} --cluster {CLUSTER}")



@lru_cache(maxsize=None)
def best():
    """(options of the fastest layout that the search finds, its step time)"""
    text = printed(SEARCH)
    found = re.search(r"^options of the fastest: (.*)$", text, re.M)
    if not found:
        raise Failure("the search found no layout that fits")
    options = found[1]
    for fixed in re.findall(r"--[a-z-]+ \S+", FIXED):
        options = options.replace(fixed, "")
    return " ".join(options.split()), planned(options)["estimate"]["step_s"]


def read(answer):
    """The options of an answer, or BadAnswer."""
    words = answer.split()
    names = [word for word in words if word.startswith("--")]
    for name in names:
        if name not in CHOICES:
            raise BadAnswer(f"{name} is not yours to choose; expected some of {' '.join(CHOICES)}")
    if not names or not words[0].startswith("--"):
        raise BadAnswer(f"'{answer}' is not a layout; expected options, such as A='--tp 4 --pp 4 --dp-shard 4 "
                        "--batch 1 --accum 64'")
    try:
        return planned(" ".join(words))
    except Failure as failure:
        raise BadAnswer(f"plan_llama3 refuses this layout: {failure}") from failure


def why_slower(estimate, fastest):
    """Where the time goes that the fastest layout does not need."""
    more = {axis: seconds - fastest["waited_s"].get(axis, 0) for axis, seconds in estimate["waited_s"].items()}
    more["computing"] = estimate["compute_s"] - fastest["compute_s"]
    most = max(more, key=more.get)
    if most == "computing":
        return f"Ranks compute {more[most]:.2f} s longer on average: are matmuls narrow, or is something done twice?"
    remark = {"tp": "its group is large or crosses hosts, or there is more of it per sequence than need be.",
              "pp": "that includes the bubble, which fewer stages, more micro-batches or virtual stages make shorter.",
              "fsdp": "weights and gradients travel for every micro-batch; fewer and larger ones need less, and so do "
                      "gradients that are added up on each rank before they are reduced."}
    return f"A rank waits {more[most]:.2f} s longer for {most}: {remark.get(most, 'are the stages equal?')}"


def check(answer):
    of_answer = read(answer)
    sequences = of_answer["tokens_per_step"] // T
    if sequences != SEQUENCES:
        print(f"wrong: a step of this layout has {sequences} sequences, not {SEQUENCES}: dp-shard · batch · accum")
        return False
    found = re.search(r"memory: ([\d.]+) of ([\d.]+) GB per rank(: does not fit)?", of_answer["text"])
    largest = max(of_answer["rank_classes"], key=lambda c: c["peak"])
    if found[3]:
        memory = sorted(largest["memory"].items(), key=lambda item: -item[1])[:3]
        print(f"wrong: it needs {found[1]} of {found[2]} GB. The most of it: "
              + ", ".join(f"{name} {size / 1e9:.1f} GB" for name, size in memory)
              + ". Which axis divides that?")
        return False
    estimate = of_answer["estimate"]
    options, seconds = best()
    print(f"It fits: {found[1]} of {found[2]} GB. The simulated step takes {estimate['step_s']:.2f} s, "
          f"{100 * (estimate['step_s'] / seconds - 1):+.1f} % relative to the best that the search finds.")
    if estimate["step_s"] <= seconds * (1 + MARGIN):
        print("right")
        return True
    print(f"wrong: more than {100 * MARGIN:.0f} % slower. " + why_slower(estimate, planned(options)["estimate"]))
    return False


def solution():
    options, seconds = best()
    estimate = planned(options)["estimate"]
    derivation = f"""\
{options}

State takes 18 bytes · 70.55e9 / 64 = 19.8 GB per rank in any layout that shards over all 64. Activations decide: a
micro-batch of 8,192 tokens keeps 80 blocks' activations, about 180 GB on one rank, which only tp divides (with pp each
rank has 1/pp of the blocks, but up to pp micro-batches). So tp is as large as a host, 8; what is left is a choice
between a deep pipeline (its bubble) and a large dp-shard (its gathers, and its buffers for whole units).
The search's best: {seconds:.2f} s per step, MFU {100 * estimate['mfu']:.1f} %; it waits """ + ", ".join(
        f"{seconds_of:.2f} s for {axis}" for axis, seconds_of in estimate["waited_s"].items()) + "."
    return derivation, [command_line(SEARCH),
                        command_line(f"{MODEL} {FIXED} {options} --cluster {CLUSTER}")]
