"""from_plans.py: figures that are drawn from plans: memory, FLOPs, communication and estimated times of layouts."""

import json
import re

from sources import H100, LAYOUT_405B, ROOT, STAGES
from svg import AXIS_COLORS, BLUE, DIM, GRAY, GREEN, INK, ORANGE, PURPLE, RED, SKY, YELLOW, Drawing, Plot, amount

LONG_405B = (
    "--model llama3.1-405b --world 16384 --tp 8 --cp 16 --pp 16 --dp-shard 8 --seq 131072 --batch 1 --accum 16 "
    "--sharding shard_grad_op --accumulate local --pp-schedule interleaved --pp-chunks 8 --pp-light-ends"
)
HOST = 8  # GPUs

# ---------------------------------------------------------------------------
# memory of the strategies

CATEGORIES = {
    "params": (BLUE, "weights, fp32"),
    "grads": (ORANGE, "gradients, fp32"),
    "optimizer": (GREEN, "Adam's moments"),
    "comm": (SKY, "bf16 weights, buffers"),
    "activations": (PURPLE, "activations"),
    "workspace": (RED, "workspace"),
}
STRATEGIES = {"no_shard": "DDP", "shard_grad_op": "ZeRO-2", "full_shard": "FSDP"}


def memory_strategies(source):
    worlds = (1, 2, 4, 8, 64)
    memory = {}
    for world in worlds:
        for strategy in STRATEGIES:
            options = f"--model llama3-8b --world {world} --sharding {strategy} --seq 4096 --batch 1 {STAGES}"
            plan = source.plan(f"memory-{strategy}-{world}", options)
            memory[world, strategy] = max((c["memory"] for c in plan["rank_classes"]), key=lambda m: sum(m.values()))
    most = max(sum(m.values()) for m in memory.values()) / 1e9
    d = Drawing(
        1000,
        470,
        "Memory per rank under three strategies of data parallelism",
        "Stacked bars of the planned memory per rank for llama3-8b on 1, 2, 4, 8 and 64 ranks with no_shard, "
        "shard_grad_op and full_shard, by category. With no_shard it does not shrink with more ranks. Sharding divides "
        "weights, gradients and optimizer state by the ranks; full_shard also frees gathered weights.",
    )
    d.heading(
        "Memory per rank: llama3-8b, one sequence of 4,096 tokens per rank, bf16",
        "DDP keeps everything on every rank. ZeRO-2 shards state and keeps gathered bf16 weights. FSDP gathers two "
        "blocks at a time.",
    )
    d.legend(16, 68, [(color, words) for color, words in CATEGORIES.values()], 12, 14)
    plot = Plot(d, (70, 84, 916, 314), [0, 1], [0, most * 1.06], room=0)
    for v in range(0, int(most) + 1, 20):
        y = plot.y.place(v)
        d.line(70, y, 986, y, "#dddddd")
        d.text(64, y + 4, f"{v}", 11, "end")
    d.text(20, 241, "GB per rank", 12, "middle", turn=-90)
    for group, world in enumerate(worlds):
        for i, strategy in enumerate(STRATEGIES):
            x = 92 + 184 * group + 52 * i
            below = 0
            for category, (color, words) in CATEGORIES.items():
                value = memory[world, strategy][category] / 1e9
                y = plot.y.place(below + value)
                d.box(x, y, 44, plot.y.place(below) - y, color, title=f"{words}: {value:.1f} GB", stroke="#ffffff")
                below += value
            d.text(x + 22, plot.y.place(below) - 5, f"{below:.1f}", 12, "middle", bold=True)
            d.text(x + 22, 414, STRATEGIES[strategy], 12, "middle")
        d.text(92 + 184 * group + 74, 438, f"{world} rank{'s' if world > 1 else ''}", 13, "middle", bold=True)
    y = plot.y.place(80)
    d.line(70, y, 986, y, INK, 1.5, "6 4")
    d.text(984, y - 6, "H100: 80 GB", 12, "end")
    d.structure = {f"{s}, {w} ranks": {c: memory[w, s][c] for c in CATEGORIES} for w in worlds for s in STRATEGIES}
    return d



# ---------------------------------------------------------------------------
# FLOPs, bytes and time of a step


def kinds_of_ops():
    """Which ops are drawn together."""
    return {
        "linear layers": (SKY, ("linear_forward", "linear_backward_input", "linear_backward_weight")),
        "attention": ("#f2c879", ("attention_forward", "attention_backward")),
        "AdamW, gradient norm": (GREEN, ("adamw", "squared_norm")),
        "SwiGLU": (PURPLE, ("swiglu_forward", "swiglu_backward")),
        "RMSNorm": (RED, ("rmsnorm_forward", "rmsnorm_backward")),
        "RoPE": (YELLOW, ("rope_forward", "rope_backward")),
        "embedding, loss": (GRAY, ("embedding_forward", "embedding_backward", "cross_entropy", "exact_total")),
    }


def draw_shares(d, x, y, width, shares, least=0.02):
    """A bar of 100 %, with the shares that are at least `least` written in it."""
    for name, color, share in shares:
        label = f"{100 * share:.1f} %" if share >= least else ""
        d.box(x, y, width * share, 40, color, label, f"{name}: {100 * share:.2f} %", 12)
        x += width * share


def step_flops(source):
    plan = source.plan("step-flops", f"--model llama3-8b --world 1 --seq 8192 --batch 1 {H100}")
    ranks = plan["rank_classes"][0]
    amounts = {"FLOPs": ranks["flops"], "bytes": ranks["op_bytes"], "time": plan["estimate"]["ops"]}
    kinds = kinds_of_ops()
    listed = {op for _, ops in kinds.values() for op in ops}
    unknown = [op for op in ranks["op_bytes"] if op not in listed]
    if unknown:
        raise ValueError(f"kinds_of_ops in from_plans.py does not know the op {unknown[0]}")
    d = Drawing(
        1000,
        352,
        "Where the FLOPs, bytes and time of a training step go",
        "Three bars of 100 percent for a step of llama3-8b on one rank: FLOPs, bytes read and written, and estimated "
        "time on an H100, divided by kind of op. Linear layers and attention have all FLOPs; AdamW and the elementwise "
        "ops have a large share of the bytes, and a small one of the time.",
    )
    d.heading(
        "A training step of llama3-8b on one rank, by kind of op",
        "One sequence of 8,192 tokens, forward, backward and AdamW; times are estimated for an H100 from the rates in "
        "its cluster file.",
    )
    x = d.legend(16, 72, [(color, name) for name, (color, _) in kinds.items()], 12, 14)
    assert x < 1000
    for row, (what, of_op) in enumerate(amounts.items()):
        y = 96 + 66 * row
        whole = sum(of_op.get(op, 0) for op in listed)
        shares = [(n, color, sum(of_op.get(op, 0) for op in ops) / whole) for n, (color, ops) in kinds.items()]
        said = {"FLOPs": amount(whole, "FLOP"), "bytes": amount(whole, "B"), "time": f"{whole:.2f} s"}[what]
        d.text(16, y + 18, what, 13, bold=True)
        d.text(16, y + 35, said, 12)
        draw_shares(d, 110, y, 874, shares)
    calls = [f"{op}: {ranks['flops'][op]} FLOPs, {ranks['op_bytes'][op]} bytes" for op in ranks["op_bytes"]]
    intensity = {
        name: sum(ranks["flops"].get(op, 0) for op in ops) / sum(ranks["op_bytes"].get(op, 0) for op in ops)
        for name, (_, ops) in kinds.items()
    }
    d.text(16, 312, "FLOPs per byte:", 12, bold=True)
    said = [f"{name} {value:,.0f}" if value >= 10 else f"{name} {value:.1f}" for name, value in intensity.items()]
    d.text(120, 312, "  ·  ".join(said), 12)
    cluster = json.loads((ROOT / "dev/clusters/h100-8.json").read_text(encoding="utf-8"))
    balance = cluster["peak_flops_per_s"]["bf16"] / cluster["memory_bytes_per_s"]
    said = f"In the time of one byte, an H100 computes {balance:.0f} FLOPs; memory limits ops that have fewer per byte."
    d.text(16, 336, said, 12, color=DIM)
    d.structure = {"ops": calls, "kinds": list(kinds)}
    return d


# ---------------------------------------------------------------------------
# traffic by axis

AXIS_WORDS = {
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "pipeline",
    "fsdp": "data parallelism (fsdp)",
}


def received_by_axis(plan):
    """Bytes that a rank receives per step over each axis: of the kind of rank that receives the most."""
    most = {}
    for ranks in plan["rank_classes"]:
        sums = {}
        for row in ranks["traffic"]:
            if row["op"] != "send":
                sums[row["axis"]] = sums.get(row["axis"], 0) + row["bytes"]["dry_run"]
        for axis, value in sums.items():
            most[axis] = max(most.get(axis, 0), value)
    return most


def hosts_of(group):
    return len({rank // HOST for rank in group})


def traffic_axes(source):
    layouts = {
        "8,192 tokens per sequence: TP 8, PP 16, DP 128": ("traffic-8k", LAYOUT_405B),
        "131,072 tokens per sequence: TP 8, CP 16, PP 16, DP 8": ("traffic-128k", LONG_405B),
    }
    d = Drawing(
        1000,
        438,
        "Bytes per axis of Llama 3 405B on 16,384 GPUs",
        "Bars of the bytes that a rank receives per training step over each axis of the mesh, for two layouts of Llama "
        "3 405B on 16,384 GPUs. Tensor parallelism receives by far the most, and stays within a host. The other axes "
        "cross hosts.",
    )
    d.heading(
        "What a rank receives per step, by axis: Llama 3 405B on 16,384 GPUs, bf16",
        "The dry run of the rank that receives the most. Tensor parallelism has the innermost axis: its groups are "
        "hosts.",
    )
    y, structure = 78, {}
    for title, (name, options) in layouts.items():
        plan = source.plan(name, f"{options} {STAGES}")
        received = received_by_axis(plan)
        d.text(16, y, title, 13, bold=True)
        most = max(received.values())
        for axis, words in AXIS_WORDS.items():
            if axis not in received:
                continue
            y += 36
            group = plan["groups"][axis][0]
            hosts = hosts_of(group)
            d.text(16, y + 6, words, 12)
            d.text(16, y + 20, f"{len(group)} ranks, {hosts} host{'s' if hosts > 1 else ''}", 11, color=DIM)
            width = 620 * received[axis] / most
            fill = AXIS_COLORS[axis]
            d.box(200, y - 4, width, 24, fill, stroke="none")
            d.text(208 + width, y + 12, f"{received[axis] / 1e9:.1f} GB", 12, bold=True)
            structure[f"{title}, {axis}"] = {"ranks": len(group), "hosts": hosts, "bytes": received[axis]}
        y += 58
    d.structure = structure
    return d


# ---------------------------------------------------------------------------
# the mesh


def mesh_16384(source):
    plan = source.plan("mesh-16", "--model tiny --world 16 --tp 2 --cp 2 --pp 2 --dp-shard 2 --seq 128")
    large = source.plan("traffic-128k", f"{LONG_405B} {STAGES}")
    axes = {"tp": "tp", "cp": "cp", "pp": "pp", "dp_shard": "dp"}
    colors = {"tp": BLUE, "cp": GREEN, "pp": ORANGE, "dp_shard": PURPLE}
    d = Drawing(
        1000,
        486,
        "How ranks are numbered on a mesh, and which groups rank 0 belongs to",
        "Sixteen ranks of a mesh with two ranks on each of the axes tp, cp, pp and dp. Tensor-parallel neighbors have "
        "adjacent numbers, context-parallel ones are 2 apart, pipeline stages 4, data-parallel ranks 8. Lines join "
        "rank 0 with the members of its group on each axis. Below: the same for the layout of 16,384 GPUs.",
    )
    d.heading(
        "16 ranks as tp 2 x cp 2 x pp 2 x dp 2: numbers, and the groups of rank 0",
        "rank = tp + 2 (cp + 2 (pp + 2 dp)): tp is innermost, so its groups are neighbors on a host.",
    )
    place = {}
    for rank in range(16):
        tp, cp, pp, dp = (rank >> i & 1 for i in range(4))
        place[rank] = (96 + 118 * tp + 300 * dp, 104 + 54 * cp + 148 * pp)
    for dp in (0, 1):
        for pp in (0, 1):
            x, y = place[4 * pp + 8 * dp]
            d.box(x - 26, y - 22, 246, 134, "#f6f6f6", stroke="#bbbbbb")
            d.text(x + 97, y + 103, f"dp {dp}, pp {pp}", 12, "middle", DIM)
    groups = {axis: plan["groups"][axis][0] for axis in axes}
    fsdp = plan["groups"]["fsdp"][0]
    for axis, group in groups.items():
        (x1, y1), (x2, y2) = (place[r] for r in group)
        dx, dy = {"tp": (44, 16), "cp": (22, 32), "pp": (8, 32), "dp_shard": (0, 4)}[axis]
        if axis == "dp_shard":
            d.polyline([(x1 + 8, y1), (x1 + 8, y1 - 10), (x2 + 8, y2 - 10), (x2 + 8, y2)], colors[axis], 3.5)
        elif axis == "pp":
            d.polyline([(x1, y1 + 26), (x1 - 16, y1 + 26), (x2 - 16, y2 + 6), (x2, y2 + 6)], colors[axis], 3.5)
        else:
            end = (x2, y2 + dy) if axis == "tp" else (x2 + dx, y2)
            d.line(x1 + dx, y1 + dy, *end, colors[axis], 3.5)
    for rank, (x, y) in place.items():
        fill = "#fff2c2" if rank in fsdp else "#ffffff"
        d.box(x, y, 44, 32, fill, str(rank), f"rank {rank}", 14, stroke=INK)
    d.text(690, 92, "Groups of rank 0", 13, bold=True)
    y = 116
    for axis, words in axes.items():
        d.line(690, y - 4, 716, y - 4, colors[axis], 3.5)
        d.text(726, y, f"{words}: ranks {' and '.join(map(str, groups[axis]))}", 12)
        y += 24
    d.box(694, y - 13, 18, 15, "#fff2c2", stroke=INK)
    d.text(726, y, f"fsdp = dp x cp: ranks {', '.join(map(str, fsdp))}", 12)
    d.text(726, y + 18, "their weights are shards of the same parameters", 11, color=DIM)
    d.text(16, 410, "The same on 16,384 GPUs: tp 8 x cp 16 x pp 16 x dp 8", 13, bold=True)
    sizes = []
    for i, (axis, words) in enumerate(axes.items()):
        group = large["groups"][axis][0]
        stride = group[1] - group[0]
        sizes.append({"axis": axis, "size": len(group), "stride": stride, "hosts": hosts_of(group)})
        said = f"{words}: {len(group)} ranks: {group[0]}, {group[1]:,}, {group[2]:,}, … {group[-1]:,}"
        hosts = hosts_of(group)
        d.line(18 + 490 * (i % 2), 430 + 28 * (i // 2), 40 + 490 * (i % 2), 430 + 28 * (i // 2), colors[axis], 3.5)
        place_text = f"{said}; {hosts} host{'s' if hosts > 1 else ''}"
        d.text(50 + 490 * (i % 2), 434 + 28 * (i // 2), place_text, 12)
    d.structure = {"groups of rank 0": {**groups, "fsdp": fsdp}, "axes of 16,384": sizes}
    return d


# ---------------------------------------------------------------------------
# the causal mask under context parallelism


def visible_pairs(parts, size):
    """Pairs of a query in these parts of a sequence and a key that it sees."""
    return sum(query + 1 for part in parts for query in range(part * size, (part + 1) * size))


def cp_mask(source):
    cp, tokens = 4, 32
    plan = source.plan("cp-mask", f"--model tiny --world 4 --cp {cp} --seq {tokens} --batch 1")
    pairs = {}
    for ranks in plan["rank_classes"]:
        for rank in ranks["ranks"]:
            pairs[rank] = ranks["flops"]["attention_forward"] / (4 * 64 * 4 * 6)  # 4 HD FLOPs, 4 heads, 6 blocks
    size = tokens // (2 * cp)
    halves = {rank: (rank, 2 * cp - 1 - rank) for rank in range(cp)}
    by_hand = {rank: visible_pairs(parts, size) for rank, parts in halves.items()}
    if by_hand != pairs:
        raise ValueError(f"the program's FLOPs of attention are those of {pairs} pairs, by hand {by_hand}")
    colors = [BLUE, ORANGE, GREEN, PURPLE]
    d = Drawing(
        1000,
        500,
        "The causal mask under context parallelism",
        "A matrix of 32 queries by 32 keys. A cell is filled if the query sees the key, in the color of the rank that "
        "computes it. Each of four ranks has two of eight parts of the sequence, one early and one late, so that all "
        "have 132 pairs. Cut into four contiguous parts they would have 36 to 228.",
    )
    d.heading(
        "Context parallelism, cp 4: which rank computes which pairs of query and key",
        f"A sequence of {tokens} tokens is cut into 2 cp = {2 * cp} parts; rank i computes the queries of parts i and "
        f"{2 * cp - 1} - i.",
    )
    cell, left, top = 12, 96, 84
    owner = {part: rank for rank, parts in halves.items() for part in parts}
    for query in range(tokens):
        for key in range(tokens):
            fill = colors[owner[query // size]] if key <= query else "#f1f1f1"
            d.box(left + cell * key, top + cell * query, cell - 1, cell - 1, fill, stroke="none")
    for part in range(2 * cp):
        y = top + cell * size * part
        d.line(left - 8, y, left + cell * tokens, y, "#ffffff", 2)
        d.text(left - 10, y + cell * size / 2 + 4, f"rank {owner[part]}", 12, "end")
    d.text(20, top + cell * tokens / 2, "queries (0 at the top)", 12, "middle", turn=-90)
    d.text(left + cell * tokens / 2, top + cell * tokens + 20, "keys (0 at the left)", 12, "middle")
    x = 560
    for row, (title, counts) in enumerate(
        (
            ("Two parts per rank, as the program cuts", [pairs[r] for r in range(cp)]),
            ("One contiguous part per rank, for comparison",
             [visible_pairs((2 * r, 2 * r + 1), size) for r in range(cp)]),
        )
    ):  # fmt: skip
        y = 108 + 190 * row
        d.text(x, y, title, 13, bold=True)
        for rank, count in enumerate(counts):
            d.text(x, y + 26 + 30 * rank, f"rank {rank}", 12)
            d.box(x + 56, y + 13 + 30 * rank, count * 1.4, 18, colors[rank], stroke="none")
            d.text(x + 62 + count * 1.4, y + 27 + 30 * rank, f"{count:.0f} pairs", 12)
    d.text(x, 470, f"The program counts attention's FLOPs for {pairs[0]:.0f} pairs per rank.", 12, color=DIM)
    d.structure = {"pairs": {str(rank): int(count) for rank, count in sorted(pairs.items())},
                   "parts": {str(rank): parts for rank, parts in halves.items()}}  # fmt: skip
    return d


# ---------------------------------------------------------------------------
# the step of 405B, and failures

MTBF = round(54 * 24 * 16384 / HOST / 466)  # hours per host: 466 interruptions in 54 days (arXiv 2407.21783, 3.3.4)
PARTS = {
    "arithmetic": SKY,
    "waiting for tp": BLUE,
    "waiting for cp": GREEN,
    "waiting for pp, with the bubble": ORANGE,
    "waiting for fsdp": PURPLE,
    "other stages end later": GRAY,
}


def smaller(options, world, shard):
    """The same layout with fewer data-parallel ranks."""
    return re.sub(r"--dp-shard \d+", f"--dp-shard {shard}", re.sub(r"--world \d+", f"--world {world}", options))


def plans_405b(source):
    """The two plans; small: with data parallelism over 2 ranks, and the second one of 4 context-parallel ranks."""
    failures = f"--mtbf {MTBF} --steps 867696 --spares 16 --detect 60"
    options = [LAYOUT_405B, LONG_405B]
    if source.small:
        options = [smaller(LAYOUT_405B, 256, 2), smaller(LONG_405B.replace("--cp 16", "--cp 2"), 512, 2)]
    first = source.plan("405b-8k", f"{options[0]} --cluster dev/clusters/h100-8.json {failures}")
    second = source.plan("405b-128k", f"{options[1]} --cluster dev/clusters/h100-8.json")
    return first, second


def step_405b(source):
    first, second = plans_405b(source)
    layouts = {"8,192 tokens: TP 8, PP 16, DP 128": first, "131,072 tokens: TP 8, CP 16, PP 16, DP 8": second}
    d = Drawing(
        1000,
        286,
        "The estimated step of Llama 3 405B on 16,384 GPUs, by parts",
        "Two bars for the estimated training step of Llama 3 405B on 16,384 H100s, for sequences of 8,192 and 131,072 "
        "tokens: arithmetic of the mean rank, and the time that it waits for communication over each axis, with the "
        "pipeline's bubble.",
    )
    d.heading(
        "The estimated step of Llama 3 405B on 16,384 H100s: what the mean rank does",
        "16 micro-batches, interleaved 1F1B with 8 virtual stages; the cluster file's rates are datasheets times "
        "assumed efficiencies.",
    )
    x, row = 16, 70
    for name, color in PARTS.items():
        x = d.legend(x, row, [(color, name)], 12, 14)
    longest = max(p["estimate"]["step_s"] for p in layouts.values())
    structure = {}
    for i, (title, plan) in enumerate(layouts.items()):
        estimate = plan["estimate"]
        waited = estimate["waited_s"]
        seconds = [estimate["compute_s"], *(waited.get(axis, 0) for axis in ("tp", "cp", "pp", "fsdp", "world"))]
        y = 112 + 96 * i
        d.text(16, y - 8, f"{title}: {estimate['step_s']:.2f} s, MFU {100 * estimate['mfu']:.0f} %", 13, bold=True)
        x, scale = 16, 968 / longest
        for (name, color), value in zip(PARTS.items(), seconds):
            if value <= 0:
                continue
            d.box(x, y, value * scale, 44, color, f"{value:.2f} s", f"{name}: {value:.3f} s", 12)
            x += value * scale
        structure[title] = [name for name, value in zip(PARTS, seconds) if value > 0]
        ops = estimate["ops"]
        linear = sum(v for k, v in ops.items() if k.startswith("linear"))
        attention = sum(v for k, v in ops.items() if k.startswith("attention"))
        rest = estimate["compute_s"] - linear - attention
        shares = f"of the arithmetic: linear layers {linear:.2f} s, attention {attention:.2f} s, the rest {rest:.2f} s"
        d.text(16, y + 62, shares, 12, color=DIM)
    d.structure = structure
    return d


WALL_CLOCK = {
    "goodput": (GREEN, "training"),
    "saving": (BLUE, "saving checkpoints"),
    "repeating": (ORANGE, "repeating lost steps"),
    "detection": (PURPLE, "noticing failures"),
    "relaunch": (YELLOW, "relaunching"),
    "waiting": (GRAY, "waiting for hosts"),
}


def goodput_row(plan, mode, interval, spares):
    for row in plan["goodput"]["rows"]:
        if (row["save_mode"], row["interval"], row["spares"]) == (mode, interval, spares):
            return row
    raise ValueError(f"the plan has no row of goodput for {mode} saves, interval {interval}, {spares} spares")


def goodput(source):
    plan, _ = plans_405b(source)
    step = plan["estimate"]["step_s"]
    steps = round(54 * 86400 / step)
    stored = (
        f"--model tiny --world 1 --hosts 2048 --mtbf {MTBF} --steps {steps} --step-seconds {step:.4g} --spares 16 "
        "--save-seconds 2.44 --pause-seconds 1"
    )
    quick = source.plan("goodput-60", f"{stored} --detect 60")
    slow = source.plan("goodput-600", f"{stored} --detect 600")
    rows = [
        ("a save takes 2.44 s, failures noticed after 600 s", slow, "best", 16),
        ("the same, failures noticed after 60 s", quick, "best", 16),
        ("this program's saves, noticed after 60 s", plan, "best", 16),
        ("no spare host (2.44 s, 60 s)", quick, "with spares", 0),
        ("1 spare host", quick, "with spares", 1),
        ("2 spare hosts", quick, "with spares", 2),
        ("4 spare hosts", quick, "with spares", 4),
    ]
    d = Drawing(
        1000,
        442,
        "Share of the time that trains, with failing hosts",
        "Stacked bars of 100 percent of the wall-clock time of training Llama 3 405B on 16,384 GPUs for 54 days, "
        "simulated with the failure rate of the Llama 3 paper: training, saving, repeating lost steps, noticing "
        "failures, relaunching and waiting for hosts, for several save times, detection times and numbers of spares.",
    )
    d.heading(
        "54 days of Llama 3 405B on 2,048 hosts of 8 GPUs, with 466 expected failures: where the time goes",
        f"MTBF {MTBF:,} h per host; relaunch 120 s; a failed host is back after 4 h; 16 spare hosts unless it says "
        "otherwise; the best save interval.",
    )
    d.legend(16, 70, list(WALL_CLOCK.values()), 12, 14)
    structure = []
    for i, (words, source_plan, interval, spares) in enumerate(rows):
        y = 92 + 48 * i + (12 if i > 2 else 0)
        mode = "async" if interval == "best" else "sync"
        row = goodput_row(source_plan, mode, interval, spares)
        shares = {"goodput": row["goodput"], **row["lost"]}
        d.text(16, y + 22, words, 12)
        x = 340
        for name, (color, what) in WALL_CLOCK.items():
            width, percent = 640 * shares[name], 100 * shares[name]
            d.box(x, y, width, 34, color, f"{percent:.1f} %", f"{what}: {percent:.2f} %", 12)
            x += width
        structure.append({"row": words, "saves": mode, "interval": interval, "spares": spares, "parts": list(shares)})
    d.structure = structure
    return d


FIGURES = {
    "memory-strategies": memory_strategies,
    "cp-mask": cp_mask,
    "traffic-axes": traffic_axes,
    "step-flops": step_flops,
    "mesh-16384": mesh_16384,
    "step-405b": step_405b,
    "goodput": goodput,
}
