"""A simulated trace in which one rank makes the others wait."""
import json
from functools import lru_cache

from answers import BadAnswer
from program import CLUSTER, ROOT, WORK, command_line, printed

TRACE = f"{WORK}/06/trace.json"
OPTIONS = f"--model llama3.2-3b --world 4 --pp 4 --seq 4096 --batch 1 --accum 8 --cluster {CLUSTER} --trace {TRACE}"
COLUMNS = 96


@lru_cache(maxsize=None)
def events():
    """The complete events of the trace, simulated now."""
    (ROOT / TRACE).parent.mkdir(parents=True, exist_ok=True)
    (ROOT / TRACE).unlink(missing_ok=True)
    printed(OPTIONS)
    return [e for e in json.loads((ROOT / TRACE).read_text())["traceEvents"] if e["ph"] == "X"]


def seconds_by_unit():
    """{rank: {unit: seconds of its forward and backward}}"""
    times = {}
    for e in events():
        if e["cat"] == "phase" and ": " in e["name"]:
            unit = e["name"].split(": ", 1)[1].split(":")[0]
            of_rank = times.setdefault(e["pid"], {})
            of_rank[unit] = of_rank.get(unit, 0) + e["dur"] / 1e6
    return times


@lru_cache(maxsize=None)
def compute_seconds():
    """{rank: seconds of its ops}"""
    times = {}
    for e in events():
        if e["cat"] == "op":
            times[e["pid"]] = times.get(e["pid"], 0) + e["dur"] / 1e6
    return times


def bottleneck():
    """(rank that computes longest, the unit of it that takes longest)"""
    rank = max(compute_seconds(), key=compute_seconds().get)
    units = seconds_by_unit()[rank]
    return rank, max(units, key=units.get)


def timeline():
    """A line per rank: what it computes in each part of the step."""
    end = max(e["ts"] + e["dur"] for e in events())
    lines = []
    for rank in sorted(compute_seconds()):
        shares = [{} for _ in range(COLUMNS)]
        for e in events():
            if e["pid"] != rank or e["cat"] != "op":
                continue
            kind = "b" if "backward" in e["name"] else "f" if "forward" in e["name"] else "o"
            first, last = e["ts"] / end * COLUMNS, (e["ts"] + e["dur"]) / end * COLUMNS
            for column in range(int(first), min(COLUMNS, int(last) + 1)):
                part = max(0, min(last, column + 1) - max(first, column))
                shares[column][kind] = shares[column].get(kind, 0) + part
        text = "".join(max(s, key=s.get) if sum(s.values()) > 0.5 else "." for s in shares)
        lines.append(f"    rank {rank}  {text}")
    return "\n".join(lines)


def facts():
    return {"trace": TRACE, "timeline": timeline()}


def check(answer):
    words = answer.replace(";", " ").replace(",", " ").lower().removeprefix("rank ").split()
    ranks = sorted(compute_seconds())
    units = sorted({unit for of_rank in seconds_by_unit().values() for unit in of_rank})
    if len(words) < 2 or not words[0].isdigit() or int(words[0]) not in ranks:
        raise BadAnswer(f"'{answer}' has no rank and cause; expected a rank from {ranks[0]} to {ranks[-1]} and one of "
                        "embedding, head, model.layers.I, messages, such as A='1 model.layers.9'")
    cause = " ".join(words[1:])
    if cause not in units + ["messages"]:
        raise BadAnswer(f"'{cause}' is no cause of waiting that the trace can show; expected embedding, head, "
                        "model.layers.I or messages")
    rank, unit = bottleneck()
    given = int(words[0])
    if (given, cause) == (rank, unit):
        print("right")
        return True
    if given != rank:
        print(f"rank {given}: wrong. It computes {compute_seconds()[given]:.3f} s of the step and waits for the rest. "
              "Which rank hardly waits?")
    else:
        print(f"rank {given}: right")
    if cause == "messages":
        print("messages: wrong. Waits are recorded at the pp axis, but look how long a send is in flight (the lanes "
              "below compute), next to a wait.")
    elif cause != unit:
        print(f"{cause}: wrong. Compare how long its forward and backward take with what other ranks do in that time.")
    return False


def solution():
    rank, unit = bottleneck()
    times, units = compute_seconds(), seconds_by_unit()[rank]
    blocks = [seconds for name, seconds in units.items() if name.startswith("model.layers")]
    derivation = f"""\
Rank {rank}, because of its {unit}.

Seconds of computing per rank: {', '.join(f'{r}: {seconds:.3f}' for r, seconds in sorted(times.items()))}. Rank {rank} \
is the only one that hardly
waits once it has begun. All ranks have as many blocks; the {unit} takes {units[unit]:.3f} s per step, as much as
{units[unit] / (sum(blocks) / len(blocks)):.1f} blocks. The others wait for it in every micro-batch. Their waits are \
recorded at pp, although messages are
in flight for a few ms in all: a wait belongs to the rank that is late, not to the network.
Remedies: fewer blocks on the last stage (--pp-light-ends), virtual stages, or a head that is split by tensor
parallelism. With equal stages a step could take about {sum(times.values()) / len(times):.3f} s and the bubble."""
    return derivation, [command_line(OPTIONS)]
