"""from_runs.py: figures that are drawn from training runs, and from the measured speed of the ops."""

import json
import math
import re

from sources import ROOT
from svg import AXIS_COLORS, BLUE, DIM, GREEN, INK, ORANGE, PURPLE, RED, Drawing, Plot, amount, text_width

# ---------------------------------------------------------------------------
# who sends how much to whom

MATRIX_RUN = "--ranks 16 --model tiny --tp 2 --cp 2 --pp 2 --dp-shard 2 --seq 128 --batch 2 --accum 2 --steps 2"


def bytes_between(trace, groups, step):
    """Bytes that a rank receives from another one in a step, by axis: {(receiver, sender): {axis: bytes}}. A
    collective's bytes come from the other members of the group in equal parts."""
    received = {}
    ranks, _ = trace.step(step, ("communication",))
    for rank, events in ranks.items():
        for e in events:
            axis, kind = trace.axis(e), e["name"].split(":")[0]
            if kind == "send" or axis == "world":
                continue
            members = next(g for g in groups[axis] if rank in g)
            others = [m for m in members if m != rank]
            for sender in others:
                of_axis = received.setdefault((rank, sender), {})
                of_axis[axis] = of_axis.get(axis, 0) + e["args"]["bytes"] / len(others)
    return received


def traffic_matrix(source):
    trace = source.trace("traffic-matrix", MATRIX_RUN, with_out=True)
    out = ROOT / source.out("traffic-matrix")
    groups = json.loads((out / "layout.json").read_text(encoding="utf-8"))["groups"]
    ledger = json.loads((out / "ledger.json").read_text(encoding="utf-8"))["traffic"]
    received = bytes_between(trace, groups, 2)
    whole = {}
    for (rank, _), by_axis in received.items():
        for axis, value in by_axis.items():
            whole.setdefault(axis, {}).setdefault(rank, 0)
            whole[axis][rank] += value
    for axis, by_rank in whole.items():
        measured = sum(r["bytes"]["measured"] for r in ledger if r["axis"] == axis and r["op"] != "send")
        if not any(abs(value - measured) < 1 for value in by_rank.values()):
            raise ValueError(f"over {axis} no rank received the {measured} bytes of the ledger: {by_rank}")
    d = Drawing(
        1000,
        566,
        "Who sends how much to whom on a mesh of 16 ranks",
        "A matrix of 16 receiving and 16 sending ranks of a run with tp 2, cp 2, pp 2 and dp 2. A cell is colored by "
        "the axis that carries most of its bytes and says how many megabytes. Neighbors communicate for tensor "
        "parallelism, ranks 2 apart for context parallelism, 4 apart for the pipeline, 8 apart for FSDP; most pairs "
        "send nothing.",
    )
    d.heading(
        "Bytes between pairs of ranks in one step: tp 2 x cp 2 x pp 2 x dp 2, tiny, fp32",
        "Measured. Rows receive, columns send; numbers are MB per step. White pairs send each other nothing but step "
        "reports.",
    )
    left, top, cell = 70, 92, 28
    for i in range(16):
        d.text(left + cell * i + cell / 2, top - 6, str(i), 12, "middle")
        d.text(left - 8, top + cell * i + 18, str(i), 12, "end")
    d.text(26, top + 8 * cell, "receiving rank", 12, "middle", turn=-90)
    d.text(left + 8 * cell, top + 16 * cell + 18, "sending rank", 12, "middle")
    for receiver in range(16):
        for sender in range(16):
            by_axis = received.get((receiver, sender))
            axis = max(by_axis, key=by_axis.get) if by_axis else None
            value = sum(by_axis.values()) / 1e6 if by_axis else 0
            said = ", ".join(f"{a} {amount(b, 'B')}" for a, b in by_axis.items()) if by_axis else "nothing"
            fill = AXIS_COLORS[axis] if axis else ("#e4e4e4" if sender == receiver else "#ffffff")
            words = f"{value:.1f}" if by_axis else ""
            title = f"rank {receiver} from rank {sender}: {said}"
            x, y = left + cell * sender, top + cell * receiver
            d.box(x, y, cell - 1, cell - 1, fill, words, title, 11, "#cccccc")
            for other in sorted(set(by_axis or ()) - {axis}):
                corner = [(x + cell - 1, y + cell - 9), (x + cell - 1, y + cell - 1), (x + cell - 9, y + cell - 1)]
                d.polygon(corner, AXIS_COLORS[other])
    x = 560
    d.text(x, 104, "What a rank receives per step", 13, bold=True)
    words = {
        "tp": ("tensor parallelism", "activations of each sublayer"),
        "cp": ("context parallelism", "keys and values; their gradients"),
        "fsdp": ("FSDP, over dp and cp", "weights; gradients"),
        "pp": ("pipeline", "the residual stream at a stage's end"),
    }
    y = 132
    for axis, (name, what) in words.items():
        values = sorted(set(whole[axis].values()))
        ends = [f"{v / 1e6:.2f}" for v in (values[0], values[-1])]
        span = ends[0] if ends[0] == ends[1] else " to ".join(ends)
        d.box(x, y - 11, 14, 14, AXIS_COLORS[axis])
        d.text(x + 22, y, f"{name}: {span} MB", 12, bold=True)
        d.text(x + 22, y + 17, what, 12, color=DIM)
        y += 48
    pairs = len(received)
    d.text(x, y + 6, f"{pairs} of 240 ordered pairs send data.", 12)
    lines = (
        "A cell has the color of the axis with the most bytes, and a",
        "corner in that of another one. Ranks 2 apart are peers of",
        "both cp and fsdp: their cells have the bytes of both.",
    )
    for i, words in enumerate(lines):
        d.text(x, y + 34 + 18 * i, words, 12, color=DIM)
    d.structure = {f"rank {rank}": {} for rank in range(16)}
    for (receiver, sender), by_axis in sorted(received.items()):
        d.structure[f"rank {receiver}"][f"from {sender}"] = {a: round(b) for a, b in sorted(by_axis.items())}
    return d


# ---------------------------------------------------------------------------
# losses of layouts

LAYOUTS = {
    "1 rank": ("--ranks 1 --batch 2 --accum 4", BLUE, 5, ""),
    "FSDP, 4 ranks": ("--ranks 4 --batch 2", ORANGE, 3, "3 7"),
    "TP 2 x PP 2": ("--ranks 4 --tp 2 --pp 2 --batch 2 --accum 4", GREEN, 2, "8 5"),
    "CP 2 x DP 2": ("--ranks 4 --cp 2 --batch 2 --accum 2", PURPLE, 2, "4 4"),
}


def losses_of(folder):
    rows = [json.loads(row) for row in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def loss_curves(source):
    steps = 2 if source.small else 40
    losses = {}
    for name, (options, *_) in LAYOUTS.items():
        common = f"--model tiny --seq 64 --steps {steps} --lr 5e-4 --warmup 5 --deterministic"
        losses[name] = losses_of(source.train(f"losses-{len(losses)}", f"{common} {options}"))
    base = losses["1 rank"]
    apart = {name: [abs(a - b) for a, b in zip(values, base)] for name, values in losses.items()}
    d = Drawing(
        1000,
        430,
        "Losses of the same run on four layouts",
        "Left: the training loss of 40 steps on one rank, with FSDP on four ranks, with tensor and pipeline "
        "parallelism, and with context and data parallelism: the curves lie on each other. Right: the differences from "
        "one rank: zero with FSDP; with the others they begin at 1e-8, since sums are rounded in another order, and "
        "grow from step to step.",
    )
    d.heading(
        "The same run on four layouts, with --deterministic (tiny, fp32, 8 sequences of 64 bytes per step)",
        "With FSDP the losses have the bits of one rank. Tensor and context parallelism add in another order.",
    )
    xs = range(1, steps + 1)
    plot = Plot(d, (70, 84, 400, 286), [0, steps], [min(base), max(base)])
    plot.frame("step", "loss")
    for name, (_, color, width, dash) in LAYOUTS.items():
        plot.curve(xs, losses[name], color, width, dash)
    bits = [v for values in apart.values() for v in values if v > 0]
    low, high = min(bits + [1e-7]) / 3, max(bits + [1e-6]) * 3
    right = Plot(d, (570, 84, 416, 286), [0, steps], [low, high], log_y=True, room=0)
    right.frame("step", "difference from 1 rank")
    for name, (_, color, _, _) in LAYOUTS.items():
        for x, value in zip(xs, apart[name]):
            if value > 0:
                d.circle(*right.at(x, value), 2.6, color, "none")
    x = 90
    for name, (_, color, width, dash) in LAYOUTS.items():
        d.line(x, 64, x + 26, 64, color, width, dash)
        zeros = sum(v == 0 for v in apart[name])
        said = name if name == "1 rank" else f"{name}: equal in {zeros} of {steps}"
        d.text(x + 32, 68, said, 12)
        x += 32 + text_width(said, 12) + 20
    d.structure = {
        "layouts": list(LAYOUTS),
        # what is promised; other layouts may be equal for some steps by chance
        "equal bits": [name for name in ("1 rank", "FSDP, 4 ranks") if max(apart[name]) == 0],
        "within 1e-5 in the first two steps": [name for name, values in apart.items() if max(values[:2]) < 1e-5],
    }
    return d


# ---------------------------------------------------------------------------
# the speed of the ops, as dev/kernels has measured it

TABLE = "dev/results/kernels-cpu.md"
TABLE_COMMAND = "make -C dev/kernels table"
PEAK = r"([\d.]+) in {} matmuls"  # as pages print it, in GFLOP/s


def kernel_rows(text):
    """The measured rows of a table: {(op, precision): {size: [(version, GFLOP/s, GB/s, share or limit)]}}."""
    tables, op, size = {}, None, None
    for row in text.splitlines():
        cells = [c.strip() for c in row.strip()[1:-1].split("|")] if row.startswith("| ") else []
        if len(cells) > 2 and cells[1] == "version":
            op = tuple(cells[0].split(", "))
            tables[op] = {}
        elif op and len(cells) >= 6 and not cells[0].startswith("--"):
            size = cells[0] or size
            if re.match(r"[\d.]+$", cells[2]):
                tables[op].setdefault(size, []).append((cells[1], float(cells[3]), float(cells[4]), cells[5]))
        elif not row.startswith("|"):
            op = None
    return tables


def measured(source):
    """The committed table. It is not measured with each drawing: that takes a quarter of an hour without other
    programs."""
    if TABLE_COMMAND not in source.used:
        source.used.append(TABLE_COMMAND)
    text = (ROOT / TABLE).read_text(encoding="utf-8")
    return kernel_rows(text), re.search(r"`; (.*), commit", text).group(1)


def versions_of(rows):
    return [name for name, *_ in rows if name != "roofline"]


def check_versions(source, page, ops, tables):
    """Does the page still have the versions that the table has? It runs on its smallest size."""
    if source.small:
        return
    for op, precision in ops:
        said = source.run(f"build/kernels-{precision}/{page} --size odd --rounds 1")
        fresh = kernel_rows(said)[op, precision]
        if not re.search(PEAK.format(precision), said):
            raise ValueError(f"{page} does not print the peak of matmuls in {precision} as roofline reads it")
        names, now = ({v for rows in t.values() for v in versions_of(rows)} for t in (tables[op, precision], fresh))
        if not now <= names:
            raise ValueError(f"{TABLE} lacks {sorted(now - names)} of {op}, {precision}: {TABLE_COMMAND} measures it")


def steps_chart(source, page, op, size, heading, below):
    tables, machine = measured(source)
    panels = [(op, "fp32"), (op, "bf16")]
    check_versions(source, page, panels, tables)
    d = Drawing(
        1000,
        390,
        heading,
        f"{heading}. Bars of the speed of each version, in percent of the roofline, in fp32 and bf16, from the naive "
        "definition to the version in use.",
    )
    d.heading(heading, f"{below} {machine}; percent of the measured roofline.")
    structure = {}
    for i, key in enumerate(panels):
        rows = tables[key][size]
        roof = next(r for r in rows if r[0] == "roofline")
        x = 16 + 492 * i
        d.text(x, 78, f"{key[1]}: roofline {roof[1]:.0f} GFLOP/s ({roof[3]})", 13, bold=True)
        for k, (name, flops, _, share) in enumerate(r for r in rows if r[0] != "roofline"):
            y = 94 + 38 * k
            used = name.startswith("in use")
            percent = float(share.rstrip(" %"))
            d.text(x, y + 17, name, 12, bold=used)
            d.box(x + 156, y, 190 * min(percent, 100) / 100, 26, GREEN if used else BLUE, stroke="none")
            d.text(x + 354, y + 17, f"{flops:.3g} GFLOP/s, {percent:.0f} %", 12)
        d.line(x + 156 + 190, 88, x + 156 + 190, 94 + 38 * (len(rows) - 1), INK, 1.2, "4 4")
        structure[", ".join(key)] = versions_of(rows)
    d.structure = structure
    return d


def matmul_steps(source):
    return steps_chart(
        source,
        "linear",
        "linear_forward",
        "bench-125m qkv: 1024 768 1280",
        "A linear layer, step by step: from a triple loop to oneDNN",
        "y = x times W transposed, 1,024 tokens, 768 to 1,280.",
    )


def attention_steps(source):
    return steps_chart(
        source,
        "attention",
        "attention_forward",
        "bench-125m: 2 512 512 12 4 64",
        "Attention, step by step: from three ops to the version in use",
        "2 x 512 tokens, 12 heads, 4 key/value heads of 64.",
    )


ROOFLINE_OPS = {
    "linear_forward": "bench-125m gate_up",
    "attention_forward": "bench-125m",
    "attention_backward": "bench-125m",
    "adapter_merge": "bench-125m gate",
    "cross_entropy": "bench-125m chunk",
    "rmsnorm_forward": "bench-125m",
    "rmsnorm_backward": "bench-125m",
    "rope": "bench-125m",
    "swiglu_forward": "bench-125m",
    "swiglu_backward": "bench-125m",
    "adamw": "bench-125m block",
    "squared_norm": "bench-125m block",
    "tree_sum": "bench-125m block, 8 ranks",
    "embedding_backward": "bench-125m",
}


def find_size(tables, op, precision, label):
    return next(rows for size, rows in tables[op, precision].items() if size.split(":")[0] == label)


def boxes_along(begin, end):
    """Small boxes that cover a line, for place_labels."""
    count = int(math.dist(begin, end) / 5) + 1
    centers = ([b + (e - b) * i / count for b, e in zip(begin, end)] for i in range(count + 1))
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in centers]


def place_labels(d, points, least, taken):
    """Writes each label beside its point, where it meets no other label, no point and none of the boxes in `taken`,
    from x `least` on."""
    taken = [*taken, *((x - 5, y - 5, x + 5, y + 5) for x, y, _ in points)]
    for x, y, words in points:
        if not words:
            continue
        width = text_width(words, 11)
        places = [(x + 9, y + 4), (x - 9 - width, y + 4), (x - width / 2, y - 10), (x - width / 2, y + 19)]
        for away in range(1, 12):
            for dx in (9, 15 * away):
                places += [(x + dx, y + 4 + 14 * s * away) for s in (-1, 1)]
                places += [(x - dx - width, y + 4 + 14 * s * away) for s in (-1, 1)]
        for left, base in places:
            box = (left, base - 9, left + width, base + 3)
            if left >= least and all(box[2] < t[0] or box[0] > t[2] or box[3] < t[1] or box[1] > t[3] for t in taken):
                break
        else:
            raise ValueError(f"no room for the label '{words}'")
        if abs(base - y - 4) > 20:
            d.line(x, y, left if left > x else left + width, base - 4, "#999999", 0.7)
        taken.append(box)
        d.text(left, base, words, 11)


def roofline(source):
    tables, machine = measured(source)
    text = (ROOT / TABLE).read_text(encoding="utf-8")
    peak = {p: max(map(float, re.findall(PEAK.format(p), text))) for p in ("fp32", "bf16")}
    memory = find_size(tables, "adamw", "fp32", "1B layer, 1 of 2 shards")[-1][2]
    cache = find_size(tables, "embedding_forward", "fp32", "bench-125m")[-1][2]
    d = Drawing(
        1000,
        560,
        "Roofline of a processor with the program's ops on it",
        "A log-log chart of speed in GFLOP/s over FLOPs per byte. Sloped lines are the bandwidth of memory and of "
        "caches, level lines the peak of matmuls in fp32 and in bf16. Linear layers and attention are near the peaks; "
        "RMSNorm, SwiGLU, RoPE, AdamW and the sums lie near the bandwidths.",
    )
    d.heading(
        f"Roofline of 2 cores of an {machine.split(',')[0]}: the ops in use, at the sizes of bench-125m",
        "Measured in fp32 (filled), linear layers and attention also in bf16 (open). Cases that fit a cache may lie "
        "above the line of memory.",
    )
    plot = Plot(d, (80, 70, 900, 430), [0.04, 900], [4, 900], True, True, room=0)
    plot.frame("FLOPs per byte that is read or written", "GFLOP/s")
    low, high, taken = plot.x.low, plot.x.high, []
    for bandwidth, words, dash in ((memory, "memory", ""), (cache, "caches", "7 5")):
        knee = peak["bf16"] / bandwidth
        start = max(low, plot.y.low / bandwidth)
        ends = [plot.at(start, bandwidth * start), plot.at(knee, peak["bf16"])]
        d.polyline(ends, RED, 2, dash)
        taken += boxes_along(*ends)
    for precision, value in peak.items():
        knee = value / cache
        d.polyline([plot.at(knee, value), plot.at(high, value)], RED, 2)
        taken += boxes_along(plot.at(knee, value), plot.at(high, value))
        taken.append((600, plot.y.place(value) - 18, 830, plot.y.place(value)))
        d.text(600, plot.y.place(value) - 7, f"peak of matmuls in {precision}: {value:.0f} GFLOP/s", 12)
    d.line(96, 92, 122, 92, RED, 2)
    d.text(128, 96, f"bandwidth of memory: {memory:.0f} GB/s (AdamW's bytes, not in a cache)", 12)
    d.line(96, 112, 122, 112, RED, 2, "7 5")
    d.text(128, 116, f"bandwidth of caches: {cache:.0f} GB/s (the embedding's bytes)", 12)
    points, structure = [], []
    for op, label in ROOFLINE_OPS.items():
        for precision in ("fp32", "bf16") if op.startswith(("linear", "attention")) else ("fp32",):
            rows = find_size(tables, op, precision, label)
            name, flops, rate, _ = next(r for r in rows if r[0].startswith("in use"))
            x, y = plot.at(flops / rate, flops)
            d.circle(x, y, 4.5, BLUE if precision == "fp32" else "#ffffff", BLUE)
            points.append((x, y, op.replace("_", " ") if precision == "fp32" else ""))
            structure.append(f"{op}, {precision}, {label}: {name}")
    place_labels(d, points, plot.x0 + 4, taken)
    d.structure = structure
    return d


FIGURES = {
    "traffic-matrix": traffic_matrix,
    "loss-curves": loss_curves,
    "roofline": roofline,
    "matmul-steps": matmul_steps,
    "attention-steps": attention_steps,
}
