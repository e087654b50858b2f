"""from_traces.py: figures that are drawn from timelines of training steps, recorded by --trace or simulated."""



from sources import H100, PLAN, PLAN_FP32, STAGES, order
from step_timeline import StepTimeline, hidden, shown
from svg import BLUE, GRAY, GREEN, INK, ORANGE, PURPLE, RED, SKY, YELLOW, Drawing, Plot, amount, text_width

# ---------------------------------------------------------------------------
# a step under each strategy of data parallelism

TINY_STEP = "--ranks 4 --model tiny --seq 128 --batch 2"


def lanes_of(events):
    """What the lanes of a rank show, in order."""
    by_kind = {"compute": [e for e in events if e["cat"] == "phase"]}
    for kind in ("all_gather", "reduce_scatter"):
        by_kind[kind] = [e for e in shown(events) if e["name"].startswith(kind)]
    return {kind: order(found) for kind, found in by_kind.items()}


def strategy_timeline(source, name, strategy, heading, what):
    trace = source.trace(name, f"{TINY_STEP} --sharding {strategy} --steps {2 if source.small else 8}")
    ranks, length = trace.step()
    desc = (
        f"Timeline of one training step of four ranks with --sharding {strategy}. {what} Each rank has a lane of what "
        "it computes, block by block forward and backward, with the time that it waits below, and lanes of its "
        "collectives. A pale background marks communication that computing hides."
    )
    t = StepTimeline(1000, length, f"A training step with {strategy} on four ranks", desc, heading, what)
    t.legend(["forward", "loss", "backward", "optimizer", "all_gather", "reduce_scatter"])
    for rank in sorted(ranks):
        t.rank(f"rank {rank}", ranks[rank])
    d = t.finish()
    share = sum(hidden(events)[1] for events in ranks.values()) / len(ranks)
    d.text(984, 24, f"{100 * share:.0f} % of communication time hidden", 12, "end")
    d.structure = {"ranks": {str(rank): lanes_of(ranks[rank]) for rank in sorted(ranks)}}
    return d


def ddp_timeline(source):
    return strategy_timeline(
        source,
        "ddp",
        "no_shard",
        "DDP (no_shard): every rank keeps all weights",
        "Gradients are summed over ranks: a reduce-scatter, then an all-gather of the sums. Weights are never sent.",
    )


def zero2_timeline(source):
    return strategy_timeline(
        source,
        "zero2",
        "shard_grad_op",
        "ZeRO-2 (shard_grad_op): weights are gathered once per step",
        "Each block's weights are all-gathered before forward and stay until backward has used them.",
    )


def zero3_timeline(source):
    return strategy_timeline(
        source,
        "zero3",
        "full_shard",
        "FSDP, ZeRO-3 (full_shard): weights are gathered twice per step",
        "Each block's weights are all-gathered before forward, freed after it, and all-gathered again before backward.",
    )


# ---------------------------------------------------------------------------
# memory over a step

BUFFER_POOLS = {"gathered weights in use": "gathered ", "full-size gradients in use": " gradient"}
MEMORY_COLORS = {
    "weights (shard)": BLUE,
    "gradients (shard)": ORANGE,
    "Adam's moments (shard)": GREEN,
    "other buffers": GRAY,
    "gathered weights": SKY,
    "full-size gradients": YELLOW,
    "activations of blocks": PURPLE,
    "workspace": RED,
}


def buffers(text):
    """The rows of plan_llama3's table of buffers: (category, name, count, bytes)."""
    rows = []
    for row in text.splitlines():
        words = row.split()
        if row.startswith("    ") and len(words) >= 5 and words[-2] == "x" and words[-1].isdigit():
            rows.append((words[0], " ".join(words[1:-3]), int(words[-3]), int(words[-1])))
    return rows


def memory_in_use(trace, step, rank, rows, blocks):
    """Bytes in use as (ms, {category: bytes}) whenever they change, and the bytes that the arenas reserve.

    Arenas and FSDP's buffers are the trace's counters. A block's activations are in use from the start of its forward
    to the end of its backward; their size is that of the buffers that the plan counts once or more for each block."""
    of_block = sum(count // blocks * size for category, _, count, size in rows if category == "activations")
    pools = {
        counter: sum(count * size for category, name, count, size in rows if category == "comm" and part in name)
        for counter, part in BUFFER_POOLS.items()
    }
    pools["full-size gradients in use"] -= sum(n * s for _, name, n, s in rows if name.startswith("gradient pieces"))
    counters = trace.memory(rank, step)
    first = dict(reversed([(name, value) for _, name, value in counters]))
    use = {
        "weights (shard)": first["params"],
        "gradients (shard)": first["grads"],
        "Adam's moments (shard)": first["optimizer"],
        "other buffers": first["comm"] - sum(pools.values()) + first["activations"] - blocks * of_block,
        "gathered weights": 0,
        "full-size gradients": 0,
        "activations of blocks": 0,
        "workspace": first["workspace"],
    }
    reserved = sum(first[c] for c in ("params", "grads", "optimizer", "comm", "activations"))
    reserved += max(value for _, name, value in counters if name == "workspace")
    changes = [(at, name.removesuffix(" in use"), value) for at, name, value in counters]
    for e in trace.step(step)[0][rank]:
        kind = e["name"].split(": ")[0]
        if "layers" in e["name"] and e["cat"] == "phase":
            at = e["at"] if kind == "forward" else e["at"] + e["ms"]
            changes.append((at, "block", of_block if kind == "forward" else -of_block))
    history = [(0, dict(use))]
    for at, name, value in sorted(changes, key=lambda c: c[0]):
        if name == "block":
            use["activations of blocks"] += value
        elif name in use:
            use[name] = value
        history.append((at, dict(use)))
    return history, reserved


def draw_stack(d, plot, history, length):
    """Areas of the categories on top of each other, in steps."""
    below = [0.0] * len(history)
    times = [at for at, _ in history] + [length]
    for name, color in MEMORY_COLORS.items():
        above = [b + use[name] / 1e6 for b, (_, use) in zip(below, history)]
        outline = []
        for values, indices in ((above, range(len(history))), (below, reversed(range(len(history))))):
            for i in indices:
                ends = (times[i], times[i + 1]) if values is above else (times[i + 1], times[i])
                outline += [plot.at(ends[0], values[i]), plot.at(ends[1], values[i])]
        d.polygon(outline, color)
        below = above
    return below


def memory_step(source):
    options = "--model tiny --seq 128 --batch 4"
    trace = source.trace("memory-step", f"--ranks 4 {options} --steps {2 if source.small else 6}")
    rows = buffers(source.run(f"{PLAN_FP32} --world 4 {options} {STAGES}"))
    step = trace.shortest_step()
    ranks, length = trace.step(step)
    history, reserved = memory_in_use(trace, step, 0, rows, 6)
    d = Drawing(
        1000,
        520,
        "Memory of one rank over a training step",
        "Stacked areas of the memory that rank 0 of four uses during one step with full_shard, by category: sharded "
        "weights, gradients and Adam's moments are constant; gathered weights come and go with each block; activations "
        "grow by one step per block in forward and shrink in backward. A line above marks what the arenas reserve.",
    )
    d.heading(
        "Memory of rank 0 over one step (tiny, full_shard on 4 ranks, fp32)",
        "Shards are constant. Activations grow with each block in forward and shrink in backward; two blocks' weights "
        "are gathered at a time.",
    )
    d.legend(16, 66, [(color, name) for name, color in list(MEMORY_COLORS.items())], 11, 8)
    plot = Plot(d, (74, 84, 906, 358), [0, length], [0, reserved / 1e6 * 1.02], room=0)
    plot.frame("ms since the step began", "MB", most=10)
    draw_stack(d, plot, history, length)
    y = plot.y.place(reserved / 1e6)
    d.line(74, y, 980, y, INK, 1.5, "6 4")
    words = f"reserved by the arenas: {reserved / 1e6:.1f} MB"
    d.text(82, y + 16, words, 12)
    phases = [("forward", "forward"), ("loss", "loss"), ("backward", "backward"), ("optimizer", "AdamW")]
    for kind, label in phases:
        spans = [e for e in ranks[0] if e["cat"] == "phase" and e["name"].split(":")[0] == kind]
        left = plot.x.place(min(e["at"] for e in spans))
        right = plot.x.place(min(length, max(e["at"] + e["ms"] for e in spans)))
        d.box(left, 484, right - left, 20, "#eeeeee", label, size=11)
    d.text(66, 498, "phase", 11, "end")
    changes = trace.memory(0, step)
    d.structure = {"categories": list(MEMORY_COLORS), "phases": order([e for e in ranks[0] if e["cat"] == "phase"])}
    for counter in BUFFER_POOLS:
        d.structure[counter] = [int(value) for _, name, value in changes if name == counter]
    d.structure["reserved"] = int(reserved)
    return d


# ---------------------------------------------------------------------------
# FSDP on GPUs, simulated: communication that arithmetic hides, and communication that it cannot hide


def overlap(source, name, options, heading):
    trace = source.trace(name, f"--model llama3-8b --world 64 {options} {H100}", PLAN)
    ranks, length = trace.step(1)
    events = [e for e in ranks[0] if e["cat"] != "wait" or e["tid"] == 0]  # other streams wait, too
    waits = sum(e["ms"] for e in events if e["cat"] == "wait")
    below = (
        f"llama3-8b with full_shard on 64 H100s, simulated; {options}. "
        f"The step takes {length:.0f} ms; for {waits:.0f} ms of them ({100 * waits / length:.0f} %) it waits."
    )
    t = StepTimeline(1000, length, heading, f"{heading}. {below} Two parts of the step are shown: the first blocks of "
                     "forward and the first blocks of backward, each with lanes for computing, waiting, all-gathers "
                     "and reduce-scatters.", heading, below)  # fmt: skip
    t.legend(["forward", "backward", "all_gather", "reduce_scatter"])
    t.y += 22
    shown_parts = (("forward", [f"forward: model.layers.{i}" for i in range(8)]),
                   ("backward", [f"backward: model.layers.{i}" for i in range(30, 24, -1)]))  # fmt: skip
    for title, names in shown_parts:
        phases = [e for e in events if e["name"] in names]
        begin, end = phases[0]["at"], phases[-1]["at"] + phases[-1]["ms"]
        t.d.text(16, t.y - 8, f"{title}, {len(phases)} blocks", 12, bold=True)
        t.window(begin, end - begin)
        cut = []
        for e in events:
            at, stop = max(e["at"], begin), min(e["at"] + e["ms"], end)
            if stop > at and (e["cat"] != "phase" or e in phases):
                cut.append({**e, "at": at, "ms": stop - at})
        t.rank("rank 0", cut)
        t.ticks()
        t.y += 34
    t.d.height = t.y - 26
    t.d.structure = {"rank 0": lanes_of(events)}
    return t.d


def overlap_hidden(source):
    return overlap(
        source, "overlap-hidden", "--seq 8192 --batch 2 --recompute full", "Long micro-batches hide communication"
    )


def overlap_exposed(source):
    return overlap(source, "overlap-exposed", "--seq 64 --batch 1", "Short micro-batches cannot hide communication")


# ---------------------------------------------------------------------------
# pipelines

PIPELINE = "--model llama3-8b --vocab-size 8192 --world 4 --pp 4 --seq 8192 --batch 1 --accum 8"
STAGE_BLOCKS = 32


def pipeline_boxes(events, stages, ranks):
    """The micro-batches that a rank computes, in order: kind, virtual stage, micro-batch, begin and end in ms. A box
    ends with its last op; what follows until the next one is waiting."""
    boxes, counts, last, in_phase = [], {}, None, ""
    for e in events:
        kind, _, unit = e["name"].partition(": ")
        if e["cat"] == "phase":
            in_phase = "" if e["name"] == "forward: embedding" else kind  # takes almost no time
            if not unit.startswith("model.layers."):
                continue
            layer = int(unit.split(".")[-1])
            stage = layer * stages // STAGE_BLOCKS // ranks
            if last != (kind, layer - (1 if kind == "forward" else -1), stage):
                number = counts.get((kind, stage), 0)
                counts[kind, stage] = number + 1
                boxes.append({"kind": kind, "stage": stage, "micro_batch": number, "begin": None})
            last = (kind, layer, stage)
        elif e["cat"] == "op" and boxes and in_phase in ("forward", "backward", "loss"):
            if boxes[-1]["begin"] is None:
                boxes[-1]["begin"] = e["at"]
            boxes[-1]["end"] = e["at"] + e["ms"]
    return boxes


def pipeline(source, name, virtual, options, heading):
    trace = source.trace(name, f"{PIPELINE} {options}{H100}", PLAN)
    ranks, length = trace.step(1, ("phase", "op", "wait"))
    idle = sum(e["ms"] for events in ranks.values() for e in events if e["cat"] == "wait") / len(ranks) / length
    formula = 3 / (8 * virtual + 3)
    below = f"4 ranks, 8 micro-batches, llama3-8b with a vocabulary of 8,192 on H100s, simulated: {length:.0f} ms."
    d = Drawing(1000, 330, heading, f"{heading}. {below} A row per rank shows which micro-batch it computes when, "
                f"forward and backward; gaps are the bubble, {100 * idle:.1f} % of the time.")  # fmt: skip
    d.heading(heading, below)
    colors = {"forward": ("#9bd3b9", "#1c7f5c"), "backward": ("#e3b4cd", "#9a4f78")}  # a rank's two stages
    for_stage = ("", ", the rank's second stage")
    d.legend(16, 68, [(c[v], kind + for_stage[v]) for kind, c in colors.items() for v in range(virtual)])
    left, scale = 70, 915 / length
    structure = {}
    for row, rank in enumerate(sorted(ranks)):
        y = 88 + row * 46
        d.box(left, y, 915, 36, "#f3f3f3", stroke="none")
        d.text(10, y + 22, f"rank {rank}", 12)
        boxes = pipeline_boxes(ranks[rank], 4 * virtual, 4)
        for b in boxes:
            title = f"{b['kind']} of micro-batch {b['micro_batch']}, {b['end'] - b['begin']:.1f} ms"
            width = (b["end"] - b["begin"]) * scale
            d.box(left + b["begin"] * scale, y, width, 36, colors[b["kind"]][b["stage"]], str(b["micro_batch"]), title)
        structure[f"rank {rank}"] = [
            f"{b['kind'][0].upper()}{b['micro_batch']}" + (f" of stage {b['stage']}" if virtual > 1 else "")
            for b in boxes
        ]
    d.text(70, 290, f"Waiting: {100 * idle:.1f} % of the time of the mean rank.", 13, bold=True)
    rule = "(P - 1) / (M + P - 1)" if virtual == 1 else "(P - 1) / (V M + P - 1)"
    given = "P = 4, M = 8" + (f", V = {virtual}" if virtual > 1 else "")
    said = f"If all stages took equally long and messages no time: {rule} = {100 * formula:.1f} %, {given}."
    d.text(70, 312, said, 12)
    d.structure = structure
    return d


def pipeline_1f1b(source):
    return pipeline(source, "pipeline-1f1b", 1, "", "1F1B: one forward, one backward in turn")


def pipeline_interleaved(source):
    options = "--pp-schedule interleaved --pp-chunks 2 "
    heading = "Interleaved 1F1B: two stages per rank, half the bubble"
    return pipeline(source, "pipeline-interleaved", 2, options, heading)


# ---------------------------------------------------------------------------
# one block

LLAMA_8B = {"N": 8192, "C": 4096, "QKV": 6144, "A": 4096, "F": 14336, "HD": 128, "NH": 32}


def block_rows():
    """The ops of a block of llama3-8b by the model's equations: (pass, op, what, shapes, FLOPs; None: not compared)."""
    s = LLAMA_8B
    n, c, qkv, a, f = s["N"], s["C"], s["QKV"], s["A"], s["F"]
    pairs = n * (n + 1) / 2
    linears = {"qkv": (c, qkv), "o": (a, c), "gate_up": (c, 2 * f), "down": (f, c)}

    def linear(op, name):
        k, m = linears[name]
        shapes = {
            "linear_forward": f"(N, {k:,}) → (N, {m:,})",
            "linear_backward_input": f"(N, {m:,}) → (N, {k:,})",
            "linear_backward_weight": f"→ ({m:,}, {k:,})",
        }
        return op, name, shapes[op], 2.0 * n * k * m

    scores = s["HD"] * s["NH"] * pairs
    forward = [
        ("rmsnorm_forward", "", f"(N, {c:,})", None),
        linear("linear_forward", "qkv"),
        ("rope_forward", "", "(N, 5,120)", None),
        ("attention_forward", "", f"(N, {qkv:,}) → (N, {a:,})", 4 * scores),
        linear("linear_forward", "o"),
        ("rmsnorm_forward", "", f"(N, {c:,})", None),
        linear("linear_forward", "gate_up"),
        ("swiglu_forward", "", f"(N, {2 * f:,}) → (N, {f:,})", None),
        linear("linear_forward", "down"),
    ]
    backward = [
        linear("linear_backward_input", "down"),
        ("swiglu_backward", "", f"(N, {f:,}) → (N, {2 * f:,})", None),
        linear("linear_backward_input", "gate_up"),
        linear("linear_backward_weight", "down"),
        ("rmsnorm_backward", "", f"(N, {c:,})", None),
        linear("linear_backward_weight", "gate_up"),
        linear("linear_backward_input", "o"),
        ("attention_backward", "", f"(N, {a:,}) → (N, {qkv:,})", 10 * scores),
        ("rope_backward", "", "(N, 5,120)", None),
        linear("linear_backward_input", "qkv"),
        linear("linear_backward_weight", "o"),
        ("rmsnorm_backward", "", f"(N, {c:,})", None),
        linear("linear_backward_weight", "qkv"),
    ]
    return {"forward": forward, "backward": backward}


def ops_of_block(trace, kind, layer):
    """A block's ops and collectives in the order in which the program calls them, with FLOPs and bytes."""
    found, inside = [], False
    for e in trace.events:
        if e["pid"] != trace.ranks[0]:
            continue
        if e["cat"] == "phase":
            inside = e["name"] == f"{kind}: model.layers.{layer}"
        elif inside and e["cat"] in ("op", "communication") and not e["name"].startswith("exact"):
            found.append(e)
    return found


def op_color(op):
    if op.startswith("linear"):
        return SKY
    return {"attention": "#f2c879", "rmsnorm": GRAY, "rope": GRAY, "swiglu": GRAY}[op.split("_")[0]]


def draw_ops(d, x, title, rows, found, whole):
    d.text(x, 74, title, 13, bold=True)
    for i, ((op, what, shapes, flops), event) in enumerate(zip(rows, found)):
        y = 88 + 33 * i
        if flops is not None and abs(event["args"]["flops"] / flops - 1) > 1e-6:
            raise ValueError(f"{op} {what}: the trace has {event['args']['flops']:.6g} FLOPs, by hand {flops:.6g}")
        share = event["args"]["flops"] / whole
        d.box(x, y, 186, 25, op_color(op), f"{op} {what}".strip(), title=f"{event['args']['flops']:.4g} FLOPs")
        d.text(x + 194, y + 16, shapes, 11)
        width = 330 * share
        d.box(x + 362, y + 4, width, 16, BLUE, stroke="none")
        d.text(x + 368 + width, y + 17, f"{100 * share:.1f} %" if share > 5e-4 else "< 0.05 %", 11)


def block(source):
    options = f"--model llama3-8b --world 1 --seq 8192 --batch 1 {H100}"
    trace = source.trace("block", options, PLAN)
    rows = block_rows()
    found = {kind: ops_of_block(trace, kind, 1) for kind in rows}
    for kind, expected in rows.items():
        names = [e["name"] for e in found[kind]]
        if names != [row[0] for row in expected]:
            raise ValueError(f"{kind} of a block calls {names}, not what block_rows in from_traces.py lists")
    whole = sum(e["args"]["flops"] for events in found.values() for e in events)
    d = Drawing(
        1000,
        526,
        "The ops of one Llama 3 block, forward and backward",
        "Two columns list the ops of a transformer block of llama3-8b in the order in which the program calls them, "
        "with the shapes of their tensors and a bar for their share of the block's FLOPs. Linear layers have most of "
        "them, attention most of the rest; RMSNorm, RoPE and SwiGLU have almost none.",
    )
    d.heading(
        "One block of llama3-8b: its ops in order, and their share of the block's FLOPs",
        f"N = 8,192 tokens of one sequence; {amount(whole, 'FLOP')} forward and backward. C 4,096; 32 heads, 8 "
        "key/value heads of 128; F 14,336.",
    )
    for kind, x in (("forward", 16), ("backward", 508)):
        flops = sum(e["args"]["flops"] for e in found[kind])
        draw_ops(d, x, f"{kind}: {amount(flops, 'FLOP')}", rows[kind], found[kind], whole)
    shares = {"linear layers": (SKY, 0), "attention": ("#f2c879", 0), "all other ops": (GRAY, 0)}
    for e in (e for of_pass in found.values() for e in of_pass):
        kind = {"linear": "linear layers", "attention": "attention"}.get(e["name"].split("_")[0], "all other ops")
        shares[kind] = (shares[kind][0], shares[kind][1] + e["args"]["flops"] / whole)
    for i, (words, (color, share)) in enumerate(shares.items()):
        d.box(16, 424 + 26 * i, 13, 13, color)
        d.text(38, 435 + 26 * i, f"{words}: {100 * share:.1f} % of the FLOPs of forward and backward", 12)
    d.structure = {
        kind: [f"{e['name']} {row[1]}: {e['args']['flops']:.0f} FLOPs" for row, e in zip(rows[kind], found[kind])]
        for kind in rows
    }
    return d


# ---------------------------------------------------------------------------
# a block under tensor parallelism

TP_LANE, TP_COLUMN = 26, 62


def tp_label(event, linears):
    """The kind of a column, "op" or the collective's name, and its label."""
    name = event["name"]
    if event["cat"] == "communication":
        return name.split(": ")
    op = name.replace("_forward", "").replace("_backward", "")
    return ["op", next(linears) if op.startswith("linear") else op]


def draw_collective(d, x, y, ranks, kind):
    """Every rank sends a piece to every other one."""
    color = BLUE if kind == "all_gather" else RED
    for sender in range(ranks):
        for receiver in range(ranks):
            if sender != receiver:
                y1, y2 = (y + TP_LANE * r + TP_LANE / 2 - 2 for r in (sender, receiver))
                d.arrow(x + 3, y1, x + TP_COLUMN - 12, y2, color, 0.8)


def draw_tp_pass(d, y, events, linears, ranks):
    """One pass: a column for each op and collective of the program, a lane for each rank."""
    width = min(TP_COLUMN, 930 / len(events))
    for rank in range(ranks):
        d.text(10, y + TP_LANE * rank + 16, f"rank {rank}", 11)
    for i, e in enumerate(events):
        x = 56 + i * width
        kind, label = tp_label(e, linears)
        if kind == "op":
            for rank in range(ranks):
                d.box(x, y + TP_LANE * rank, width - 3, TP_LANE - 4, op_color(e["name"].split("_")[0]), title=e["name"])
        else:
            draw_collective(d, x, y, ranks, kind)
        top = y - 8 - 14 * (i % 3)
        d.text(x + width / 2 - 2, top, label.replace("attention ", "attn. "), 11, "middle")
        d.line(x + width / 2 - 2, top + 2, x + width / 2 - 2, y - 2, "#aaaaaa", 0.7)


def tp_block(source):
    ranks = 4
    trace = source.trace("tp-block", f"--model llama3-8b --world 4 --tp 4 --seq 8192 --batch 1 {H100}", PLAN)
    passes = {kind: ops_of_block(trace, kind, 1) for kind in ("forward", "backward")}
    small = ("sum_pieces", "cast", "rope")
    passes = {k: [e for e in events if not e["name"].startswith(small)] for k, events in passes.items()}
    bytes_of = {e["args"]["bytes"] for events in passes.values() for e in events if e["cat"] == "communication"}
    if len(bytes_of) != 1:
        raise ValueError(f"the collectives of a block have different sizes: {sorted(bytes_of)}")
    received = bytes_of.pop()
    d = Drawing(
        1000,
        440,
        "Collectives within a block under tensor parallelism",
        "For a block of llama3-8b with four tensor-parallel ranks: each op and each collective in the program's order, "
        "forward and backward. Before attention and before the MLP every rank sends its quarter of the tokens to all "
        "others (all-gather); after each, every rank sends partial sums to their owners (reduce-scatter). Backward "
        "gathers output gradients and, again, the inputs, and reduce-scatters input gradients.",
    )
    d.heading(
        "Tensor parallelism with sequence parallelism: who sends what in a block (llama3-8b, tp 4)",
        f"In each collective a rank receives {amount(received / 3, 'B')} from each of the 3 others: 2,048 of 8,192 "
        "tokens x 4,096 in bf16.",
    )
    end = d.legend(16, 68, [(SKY, "linear"), ("#f2c879", "attention"), (GRAY, "RMSNorm, SwiGLU")])
    for color, words in ((BLUE, "all-gather: each sends its tokens"), (RED, "reduce-scatter: each sends partial sums")):
        d.arrow(end, 64, end + 22, 64, color)
        d.text(end + 27, 68, words, 12)
        end += 27 + text_width(words, 12) + 18
    linears = {
        "forward": ["qkv", "o", "gate, up", "down"],
        "backward": ["d down", "d gate_up", "down's dW", "gate_up's dW", "d o", "d qkv", "o's dW", "qkv's dW"],
    }
    for kind, y in (("forward", 140), ("backward", 320)):
        count = sum(e["cat"] == "communication" for e in passes[kind])
        d.text(10, y - 52, f"{kind}: {count} collectives", 12, bold=True)
        draw_tp_pass(d, y, passes[kind], iter(linears[kind]), ranks)
    d.structure = {k: [e["name"] for e in events] for k, events in passes.items()} | {"bytes received": int(received)}
    return d


FIGURES = {
    "zero3-timeline": zero3_timeline,
    "zero2-timeline": zero2_timeline,
    "ddp-timeline": ddp_timeline,
    "pipeline-1f1b": pipeline_1f1b,
    "pipeline-interleaved": pipeline_interleaved,
    "memory-step": memory_step,
    "overlap-hidden": overlap_hidden,
    "overlap-exposed": overlap_exposed,
    "tp-block": tp_block,
    "block": block,
}
