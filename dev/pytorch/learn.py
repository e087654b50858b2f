"""learn.py: does the program learn as well as others?

    dev/data/texts.sh data/texts                         # three texts out of Debian's packages
    make PRECISION=fp32 && make PRECISION=bf16
    python dev/pytorch/learn.py compare                  # the same run in transformers and litgpt, step by step
    python dev/pytorch/learn.py chaos                    # a rate at which training is chaotic; fp32 and bf16
    python dev/pytorch/learn.py nanogpt --nanogpt DIR    # nanoGPT's small task; DIR: a clone of karpathy/nanoGPT
    python dev/pytorch/learn.py scaling                  # five widths, three texts
    python dev/pytorch/learn.py muon                     # AdamW and Muon, five learning rates each, three texts

Needs torch, transformers and safetensors; compare also litgpt, if it can be imported. Each command trains what is not
yet in --work, so it may be interrupted and continued, prints its figures next to their bounds, and writes its section
there. --out FILE.md writes all sections so far to FILE.md, and their pictures to FILE.svg next to it. Everyone starts
from weights that the program saved, and trains on the windows that the program recorded (learn_runs.py). With one
thread each, by default. Ends with an error if a bound is missed.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import pickle
import re
import statistics
import subprocess
import sys
from pathlib import Path

import learn_charts
import numpy
import torch
import torch.nn.functional as F
from learn_charts import COLORS, binned
from learn_runs import (
    CHANGES,
    SPECIAL,
    TINY,
    TOP,
    Runs,
    Setting,
    held_out,
    learning_rate,
    llama,
    ours,
    parameters,
    pytorch,
    run,
    tokens,
    write_token_file,
)

TEXTS = ("novels", "bible", "code")
STEP_BOUND = 1e-4  # of a step's loss, in compare
STABLE = (8, 256)  # compare's windows a step and tokens a window: with 4 of 128, training is chaotic after 268 steps
FIRST_ABOVE = f"the first step whose losses differ by more than {STEP_BOUND:.0e}"
RATIO_BOUND = 1.5  # of the distance to PyTorch, relative to the distance between two layouts of the program
EXACT_STEPS, MISTAKE_STEPS = 200, 40  # how far compare follows double precision, and runs with a mistake
HEAD = (
    "# Does it learn as well as others?\n\nEach section is one command, and can be measured again: see "
    "[learn.py](../pytorch/learn.py).\n\n"
)
ERRORS_BOUND = 2  # of the mean paired difference, in standard errors


class Report:
    """Figures with their bounds, and a section of Markdown. `name` is in the name of its picture."""

    def __init__(self, name, title):
        self.name, self.title, self.rows, self.wrong, self.parts, self.panels = name, title, [], 0, [], []

    def add(self, what, figure, bound="", good=True):
        self.rows.append((what, figure, bound or "none", ("yes" if good else "NO") if bound else ""))
        self.wrong += not good
        print(f"{'pass' if good else 'FAIL'} {what}: {figure}{', expected ' + bound if bound else ''}", flush=True)

    def text(self, words):
        self.parts.append(words)

    def table(self, head, rows):
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
        self.parts.append("\n".join(lines))

    def finish(self, args, runs):
        if self.rows:
            self.table(["what", "measured", "bound", "met"], self.rows)
        makers = sorted({r["made_by"] for r in runs.made})
        threads = f"{args.threads} thread{'s' if args.threads > 1 else ''}"
        self.parts.insert(0, f"`{command_line()}`; {processor()}, {threads} each; {'; '.join(makers)}.")
        if args.out:
            write_section(args.out, self)
        if self.wrong:
            sys.exit(f"error: {self.wrong} of {len(self.rows)} figures miss their bounds")
        print(f"{len(self.rows)} figures, all within their bounds")


def command_line():
    """As it was typed, without --out and with the last part of each path."""
    kept = [a for i, a in enumerate(sys.argv[1:], 1) if not (a.startswith("--out") or sys.argv[i - 1] == "--out")]
    return " ".join(["python dev/pytorch/learn.py", *(Path(a).name if "/" in a else a for a in kept)])


def processor():
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return "unknown processor"


def write_section(out, report):
    """Replaces the report's section in `out`, or appends it, and draws its picture next to `out`."""
    head, *sections = re.split(
        r"^(?=## )", out.read_text(encoding="utf-8") if out.is_file() else HEAD, flags=re.MULTILINE
    )
    parts = list(report.parts)
    if report.panels:
        picture = out.with_name(f"{out.stem}-{report.name}.svg")
        learn_charts.draw(report.panels, picture)
        parts.insert(1, f"![{', '.join(panel['title'] for panel in report.panels)}]({picture.name})")
    heading = f"## {report.title}\n\n"
    section = heading + "\n\n".join(parts)
    at = next((i for i, old in enumerate(sections) if old.startswith(heading)), len(sections))
    sections[at : at + 1] = [section]
    out.write_text("\n\n".join(part.rstrip() for part in (head, *sections)) + "\n", encoding="utf-8")


def differences(a, b):
    return [abs(x - y) for x, y in zip(a["losses"], b["losses"], strict=True)]


def check_samples(report, what, one, other):
    """The two runs must have trained on the same windows in every step."""
    differ = sum(sorted(a) != sorted(b) for a, b in zip(one["samples"], other["samples"], strict=True))
    report.add(f"{what}: steps that trained on other windows", str(differ), "0", differ == 0)


def curve(label, color, ys, **more):
    xs, ys = binned(list(range(1, len(ys) + 1)), list(ys), pick=more.pop("pick", None))
    return dict(label=label, color=COLORS[color], xs=xs, ys=ys, **more)


# ---------------------------------------------------------------------------
# compare: step by step


def compare(args, runs):
    title, name = "The same run in PyTorch, step by step", "compare"
    is_stable = (args.batch, args.seq) == STABLE
    if not is_stable:
        title, name = f"{title}, {args.batch} windows of {args.seq} tokens", f"{name}-{args.batch}x{args.seq}"
    report = Report(name, title)
    setting = Setting(
        args.texts / "bible",
        TINY,
        args.steps or 1000,
        args.seeds[0],
        lr=3e-4,
        min_lr=3e-5,
        batch=args.batch,
        seq=args.seq,
    )
    wanted = args.only or ["transformers", *(["litgpt"] if importlib.util.find_spec("litgpt") else [])]
    program, layout = ours(runs, setting), ours(runs, setting, ranks=2)
    check_samples(report, "the program on 1 and on 2 ranks", program, layout)
    worst = max(abs(r - learning_rate(setting, i)) / r for i, r in enumerate(program["lrs"], 1))
    report.add("learning rate of a step, largest relative difference", f"{worst:.1e}", "<= 1e-8", worst <= 1e-8)
    others = {name: pytorch(runs, setting, name, program["samples"]) for name in wanted}
    compare_rounding(report, runs, setting, program, others)
    for name, other in others.items():
        worst = max(differences(program, other))
        what = f"{name}: largest difference of a step's loss in {setting.steps:,} steps"
        bound = f"<= {STEP_BOUND:.0e}" if is_stable else ""
        report.add(what, f"{worst:.1e}", bound, not is_stable or worst <= STEP_BOUND)
        report.add(f"{name}: {FIRST_ABOVE}", first_above(differences(program, other)))
    worst = max(differences(program, layout))
    report.add("this program on 1 and on 2 ranks: largest difference of a step's loss", f"{worst:.1e}")
    report.add(
        f"this program on 1 and on 2 ranks: {FIRST_ABOVE}",
        first_above(differences(program, layout)),
    )
    if "transformers" in others:
        compare_norms(report, runs, setting, program, others["transformers"])
    compare_apart(report, program, layout, others, is_stable)
    if "transformers" in others:
        noticed(report, runs, setting, program, others["transformers"])
    table = [["this program, 1 rank", program], ["this program, 2 ranks", layout], *others.items()]
    report.text(
        f"The preset `tiny` ({parameters(TINY)[0]:,} parameters) on the King James text, fp32: {setting.steps:,} steps "
        f"of {setting.batch} windows of {setting.seq} tokens, {shape_of_schedule(setting)}. "
        "Losses of two programs can agree only as long as their rounding errors have not grown. The two layouts of "
        "this program show when that happens without any difference between programs, and double precision shows "
        "whose errors are larger before. On PyTorch's side the squares of the gradient norm are summed in double "
        "precision; the rows about `clip_grad_norm_` say why."
    )
    report.table(
        ["", "loss, first step", f"mean of the last {LAST} steps", "held-out loss"],
        [[name, f"{r['losses'][0]:.6f}", f"{last_mean(r):.6f}", f"{r['val'][-1][1]:.6f}"] for name, r in table],
    )
    report.panels += compare_panels(program, layout, others)
    report.finish(args, runs)


LAST = 50  # steps at the end whose mean loss is compared


def last_mean(result):
    return statistics.fmean(result["losses"][-LAST:])


def shape_of_schedule(s):
    return (
        f"AdamW at {s.lr:g} (warm-up of {s.warmup} steps, cosine to {s.min_lr:g}), betas 0.9 and {s.beta2:g}, weight "
        f"decay {s.weight_decay:g} except on norms, clipping at {s.clip:g}"
    )


def first_above(values):
    return f"{next((i for i, d in enumerate(values, 1) if d > STEP_BOUND), 'none')}"


def compare_rounding(report, runs, setting, program, others):
    """Where training is not yet chaotic: the program's rounding errors must not be much larger than PyTorch's."""
    stop = min(EXACT_STEPS, setting.steps)
    exact = pytorch(runs, setting, "exact", program["samples"], stop=stop)

    def error(result):
        return max(abs(a - b) for a, b in zip(result["losses"], exact["losses"]))

    theirs = {name: error(other) for name, other in others.items()}
    for name, worst in theirs.items():
        report.add(f"{name}: largest difference of a step's loss from double precision, {stop} steps", f"{worst:.1e}")
    if theirs:
        bound = RATIO_BOUND * max(theirs.values())
        mine = error(program)
        what = f"this program: the same difference; its bound is {RATIO_BOUND} times the larger of PyTorch's"
        report.add(what, f"{mine:.1e}", f"<= {bound:.1e}", mine <= bound)


def compare_norms(report, runs, setting, program, transformers):
    """PyTorch's clip_grad_norm_ sums squares in fp32 on a CPU. Measures what this alone changes."""
    plain = pytorch(runs, setting, "transformers", program["samples"], fp32_norm=True)
    error = abs(plain["norms"][0] / program["norms"][0] - 1)
    report.add("clip_grad_norm_, which sums in fp32: relative error of the first norm", f"{error:.1e}")
    worst = max(differences(transformers, plain))
    report.add("transformers with this norm and with an exact one: largest difference of a step's loss", f"{worst:.1e}")
    worst = abs(transformers["norms"][0] / program["norms"][0] - 1)
    report.add(
        "transformers' first norm, summed in double precision: relative difference from this program's",
        f"{worst:.1e}",
        "<= 1e-7",
        worst <= 1e-7,
    )


def compare_apart(report, program, layout, others, is_stable):
    """Over all steps: where training is chaotic, the program must not be much farther from PyTorch than from itself on
    another layout."""
    own = statistics.fmean(differences(program, layout))
    report.add("this program on 1 and on 2 ranks: mean difference of a step's loss", f"{own:.1e}")
    for name, other in others.items():
        across = statistics.fmean(differences(program, other))
        what = f"{name}: mean difference of a step's loss, relative to that"
        bound = "" if is_stable else f"<= {RATIO_BOUND}"
        report.add(what, f"{across / own:.2f}", bound, is_stable or across <= RATIO_BOUND * own)
    if len(others) == 2:
        worst = max(differences(*others.values()))
        report.add("transformers and litgpt, which compute with the same kernels: largest difference", f"{worst:.1e}")


def noticed(report, runs, setting, program, unchanged):
    """The comparison is worth something if each of these mistakes, on PyTorch's side, is seen."""
    stop = min(MISTAKE_STEPS, setting.steps)

    def worst(other):
        return max(abs(a - b) for a, b in zip(program["losses"][:stop], other["losses"]))

    least = 10 * worst(unchanged)
    report.add(f"transformers: largest difference of a step's loss in {stop} steps", f"{least / 10:.1e}")
    for change in CHANGES:
        found = worst(pytorch(runs, setting, "transformers", program["samples"], change=change, stop=stop))
        what = f"transformers with a mistake ({change}): the same; its bound is ten times that without a mistake"
        report.add(what, f"{found:.1e}", f">= {least:.1e}", found >= least)


def compare_panels(program, layout, others):
    losses = [curve("this program", "ours", program["losses"], width=4)]
    losses += [curve(name, name, r["losses"], dash=dash) for (name, r), dash in zip(others.items(), ("", "5 4"))]
    apart = [curve(f"this program to {name}", name, differences(program, r), pick=max) for name, r in others.items()]
    if len(others) == 2:
        apart.append(curve("transformers to litgpt", "apart", differences(*others.values()), pick=max, dash="5 4"))
    apart.append(curve("between 1 and 2 ranks", "second", differences(program, layout), pick=max))
    apart.append(
        dict(label="bound", color=COLORS["bound"], xs=[1, len(program["losses"])], ys=[STEP_BOUND] * 2, dash="2 3")
    )
    x = "step"
    return [
        dict(title="Training loss, learning rate 3e-4", x=x, y="loss", series=losses),
        dict(
            title="Difference of a step's loss",
            x=x,
            y="difference",
            log_y=1,
            series=apart,
            legend="below",
        ),
    ]


# ---------------------------------------------------------------------------
# chaos: a rate at which the last bits decide


def chaos(args, runs):
    report = Report("chaos", "At a rate at which training is chaotic")
    precisions = [p for p in ("fp32", "bf16") if not args.only or p in args.only]
    setting = Setting(
        args.texts / "bible", TINY, args.steps or 200, lr=2e-3, min_lr=2e-4, batch=args.batch, seq=args.seq
    )
    report.text(
        f"The same model and text at the rate of `make demo`: {setting.steps} steps of {setting.batch} windows of "
        f"{setting.seq} tokens, {shape_of_schedule(setting)}; seeds {', '.join(map(str, args.seeds))}, which determine "
        "the initial weights and the order of the windows. Differences of the last bits grow until they no longer "
        "depend on their cause, so there is a distance even between two runs of one program. A distance here is the "
        "mean of a step's difference of the loss, over all steps and seeds. In bf16, PyTorch runs under autocast."
    )
    for precision in precisions:
        results = {seed: chaos_seed(runs, dataclasses.replace(setting, seed=seed), precision) for seed in args.seeds}
        chaos_figures(report, precision, results)
        report.panels.append(chaos_panel(precision, list(results.values())))
    report.finish(args, runs)


def chaos_seed(runs, setting, precision):
    first, second = ours(runs, setting, precision), ours(runs, setting, precision, ranks=2)
    cast = precision == "bf16"
    whole = pytorch(runs, setting, "transformers", first["samples"], autocast=cast)
    found = dict(first=first, second=second, whole=whole)
    if cast:
        found["parts"] = pytorch(runs, setting, "transformers", first["samples"], autocast=cast, parts=2)
    return found


def chaos_figures(report, precision, results):
    def distance(a, b):
        return statistics.fmean(statistics.fmean(differences(r[a], r[b])) for r in results.values())

    for seed, r in results.items():
        check_samples(report, f"{precision}, seed {seed}: 1 and 2 ranks", r["first"], r["second"])
    layouts, across = distance("first", "second"), distance("first", "whole")
    report.add(f"{precision}: distance between 1 and 2 ranks", f"{layouts:.2e}")
    floor, which = layouts, "that between ranks"
    if precision == "bf16":
        floor, which = max(layouts, distance("whole", "parts")), "the larger of these two"
        what = f"{precision}: distance between PyTorch's step in 1 and in 2 micro-batches"
        report.add(what, f"{distance('whole', 'parts'):.2e}")
    report.add(
        f"{precision}: distance between 1 rank and PyTorch, relative to {which}",
        f"{across / floor:.2f}",
        f"<= {RATIO_BOUND}",
        across <= RATIO_BOUND * floor,
    )
    # Only one of these figures has a bound, fixed beforehand: each would miss it by chance in one of nine comparisons.
    figures = (
        ("held-out loss", lambda r: r["val"][-1][1], True),
        (f"mean loss of the last {LAST} steps", last_mean, False),
    )
    for what, of, bounded in figures:
        pairs = [of(r["first"]) - of(r["whole"]) for r in results.values()]
        mean, error = statistics.fmean(pairs), statistics.stdev(pairs) / math.sqrt(len(pairs))
        averages = [statistics.fmean(of(r[k]) for r in results.values()) for k in ("first", "whole")]
        report.add(
            f"{precision}: {what}, this program {averages[0]:.5f}, PyTorch {averages[1]:.5f}; mean difference "
            f"{mean:+.5f}, in standard errors of the paired difference ({error:.5f})",
            f"{mean / error:+.2f}",
            f"within ±{ERRORS_BOUND}" if bounded else "",
            not bounded or abs(mean) <= ERRORS_BOUND * error,
        )


def chaos_panel(precision, results):
    def mean_difference(a, b):
        return numpy.mean([differences(r[a], r[b]) for r in results], axis=0).tolist()

    pairs = [
        ("1 rank and 2 ranks", "second", "first", "second"),
        ("1 rank and PyTorch", "transformers", "first", "whole"),
    ]
    if precision == "bf16":
        pairs.append(("PyTorch, 1 and 2 micro-batches", "litgpt", "whole", "parts"))
    return dict(
        title=f"Learning rate 2e-3, {precision}: mean difference of {len(results)} seeds",
        x="step",
        y="difference",
        log_y=1,
        legend="below",
        series=[curve(label, color, mean_difference(a, b)) for label, color, a, b in pairs],
    )


# ---------------------------------------------------------------------------
# nanogpt: a public task with a public figure

NANOGPT = dict(
    block_size=64,
    batch_size=12,
    n_layer=4,
    n_head=4,
    n_embd=128,
    max_iters=2000,
    lr_decay_iters=2000,
    dropout=0.0,
    eval_iters=20,
    eval_interval=2000,
)  # the README's run on a CPU
NANOGPT_README = 1.88  # the loss that nanoGPT's README reports for it


def nanogpt(args, runs):
    name = "shakespeare" if args.shakespeare else "novels"
    report = Report(f"nanogpt-{name}", f"nanoGPT's small task, on {'Shakespeare' if args.shakespeare else name}")
    if not args.nanogpt or not (args.nanogpt / "train.py").is_file():
        sys.exit(
            f"error: --nanogpt {args.nanogpt}: expected a clone of nanoGPT, with train.py: "
            "git clone https://github.com/karpathy/nanoGPT"
        )
    folder, vocabulary, what = characters(args, name)
    steps = args.steps or NANOGPT["max_iters"]
    # As many parameters in a block as GPT-2's: 4 C² of attention, 3 C F = 8 C² of the MLP; F is 341 rounded down.
    model = llama(C=128, L=4, NH=4, NKV=4, FF=340, V=vocabulary, theta=10000.0, tied=True, positions=64)
    setting = Setting(
        folder, model, steps, lr=1e-3, min_lr=1e-4, warmup=100, batch=12, seq=64, beta2=0.99, val_batches=0
    )
    theirs = runs.get("nanogpt", setting, lambda: train_nanogpt(args, runs, folder, steps))
    results = [ours(runs, dataclasses.replace(setting, seed=seed)) for seed in args.seeds]
    same = pytorch(runs, dataclasses.replace(setting, seed=args.seeds[0]), "transformers", results[0]["samples"])
    losses = [r["val"][-1][1] for r in results]
    report.text(
        f"Characters of {what}. There are {vocabulary} different ones; the first 90 % for training, the rest held out. "
        "nanoGPT by its README's command for a CPU (4 layers, 4 heads, 128 wide, windows of 64 characters, 12 a step, "
        f"{steps:,} steps, no dropout), unchanged. This program has Llama's architecture with the same width, heads, "
        f"layers, batch and schedule, and {parameters(model)[0]:,} parameters. The loss is that of all "
        "held-out text, in windows of 64; the CPU time is that of the whole process, with its validation. transformers "
        "trains the same Llama from the same weights on the same windows as the program's first seed, which shows how "
        "much of the difference from nanoGPT is the architecture's."
    )
    report.table(
        ["", "parameters", "held-out loss", "training loss, last 50 steps", "CPU seconds"],
        [
            [
                "nanoGPT",
                f"{theirs['parameters']:,}",
                f"{theirs['val'][-1][1]:.4f}",
                f"{last_mean(theirs):.4f}",
                f"{theirs['cpu_seconds']:.0f}",
            ],
            *[
                [
                    f"this program, seed {seed}",
                    f"{parameters(model)[0]:,}",
                    f"{r['val'][-1][1]:.4f}",
                    f"{last_mean(r):.4f}",
                    f"{r['cpu_seconds']:.0f}",
                ]
                for seed, r in zip(args.seeds, results)
            ],
            [
                f"transformers, the same Llama, seed {args.seeds[0]}",
                f"{parameters(model)[0]:,}",
                f"{same['val'][-1][1]:.4f}",
                f"{last_mean(same):.4f}",
                "",
            ],
        ],
    )
    report.add(
        "nanoGPT's own estimate of its held-out loss, of 240 random windows; its README says 1.88 on Shakespeare",
        f"{theirs['own_estimate']:.2f}",
    )
    report.add(
        f"largest held-out loss of {len(losses)} seeds, next to nanoGPT's",
        f"{max(losses):.4f}",
        f"<= {theirs['val'][-1][1]:.4f}",
        max(losses) <= theirs["val"][-1][1],
    )
    if args.shakespeare and steps == NANOGPT["max_iters"]:
        report.add(
            "the same, next to the README's figure",
            f"{max(losses):.4f}",
            f"<= {NANOGPT_README}",
            max(losses) <= NANOGPT_README,
        )
    report.finish(args, runs)


def characters(args, name):
    """Writes the text's characters as nanoGPT's files and as token files. Returns the folder, the size of the
    vocabulary, and what the text is."""
    if args.shakespeare:
        text, what = args.shakespeare.read_text(), "Shakespeare's plays, nanoGPT's own text"
    else:
        files = sorted((args.texts / "novels" / "text").glob("*.txt"))
        text = "".join(f.read_text() for f in files)[:1_115_394]
        what = "novels by Jane Austen, as many as nanoGPT takes of Shakespeare's plays"
    alphabet = sorted(set(text))
    ids = {c: i for i, c in enumerate(alphabet)}
    folder = (args.work / "characters" / name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    cut = int(0.9 * len(text))
    for part, characters in (("train", text[:cut]), ("val", text[cut:])):
        numbers = numpy.array([ids[c] for c in characters], dtype=numpy.uint16)
        numbers.tofile(folder / f"{part}.bin")
        write_token_file(folder / f"{part}.tok", numbers, len(alphabet))
    (folder / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=len(alphabet))))
    return folder, len(alphabet), what


def train_nanogpt(args, runs, folder, steps):
    out = (args.work / "out" / "nanogpt").resolve()
    settings = NANOGPT | dict(max_iters=steps, lr_decay_iters=steps, eval_interval=steps)
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        "--device=cpu",
        "--compile=False",
        "--log_interval=1",
        "--always_save_checkpoint=True",
        f"--dataset={folder}",
        f"--out_dir={out}",
        *[f"--{k}={v}" for k, v in settings.items()],
    ]
    log = args.work / "logs" / "nanogpt"
    threads = str(runs.threads)
    cpu_seconds = run(
        command, log, cwd=args.nanogpt, env=os.environ | {"OMP_NUM_THREADS": threads, "PYTHONDONTWRITEBYTECODE": "1"}
    )
    said = log.read_text()
    iterations = re.findall(r"^iter \d+: loss ([\d.]+)", said, re.M)
    own = float(re.search(rf"^step {steps}: .*val loss ([\d.]+)", said, re.M)[1])
    spec = importlib.util.spec_from_file_location("nanogpt_model", args.nanogpt / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = torch.load(out / "ckpt.pt", map_location="cpu")
    model = module.GPT(module.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    commit = subprocess.run(["git", "-C", args.nanogpt, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return dict(
        losses=[float(loss) for loss in iterations][:steps],
        cpu_seconds=cpu_seconds,
        val=[[steps, nanogpt_loss(model.eval(), tokens(folder / "val.tok"))]],
        own_estimate=own,
        parameters=sum(p.numel() for p in model.parameters()),
        made_by=f"nanoGPT {commit.stdout.strip() or 'without a commit'}, torch {importlib.metadata.version('torch')}",
    )


def nanogpt_loss(model, ids):
    """The mean loss over all targets in windows of 64, the last of which may be shorter, as --val counts them."""
    T, total = NANOGPT["block_size"], 0.0
    with torch.no_grad():
        for i in range(0, len(ids) - 1, T):
            x, y = ids[i : i + T][: len(ids) - 1 - i], ids[i + 1 : i + 1 + T]
            logits, _ = model(x[None], y[None])  # with targets it returns the logits of all positions
            total += F.cross_entropy(logits[0].double(), y, reduction="sum").item()
    return total / (len(ids) - 1)


# ---------------------------------------------------------------------------
# scaling: the loss as a power of the number of parameters

WIDTHS = (64, 96, 128, 192, 256)
SCALING_BOUND = 0.01  # relative difference of bits per byte, and of the fitted exponents


def scaling(args, runs):
    report = Report("scaling", "Five widths")
    steps = args.steps or 300
    names = [t for t in TEXTS if not args.only or t in args.only]
    rows, fits = [], {}
    for name in names:
        folder = byte_tokens(args, name)
        with_pytorch = name in args.pytorch_texts
        for width in WIDTHS:
            # bytes as tokens: 256 of them, and the tokenizer's special tokens
            model = llama(C=width, L=4, NH=width // 32, NKV=width // 32, FF=width * 8 // 3 // 8 * 8, V=SPECIAL + 256)
            setting = Setting(folder, model, steps, args.seeds[0], lr=2e-3, min_lr=2e-4, batch=8, seq=args.seq)
            mine = ours(runs, setting)
            other = pytorch(runs, setting, "transformers", mine["samples"]) if with_pytorch else None
            inner = parameters(model)[1]
            rows.append((name, width, inner, bits(mine, setting), bits(other, setting) if other else None))
        for column, who in ((3, "this program"), (4, "PyTorch")):
            points = [(r[2], r[column]) for r in rows if r[0] == name and r[column] is not None]
            if points:
                fits[name, who] = fit(points)
    report.text(
        f"Bytes as tokens; 4 blocks of five widths, {steps} steps of 8 windows of {args.seq} bytes "
        f"({steps * 8 * args.seq:,} bytes for each), {shape_of_schedule(setting)}. PyTorch is transformers' Llama from "
        f"the same weights on the same windows; it ran for {' and '.join(args.pytorch_texts)}. Bits per byte are those "
        f"of {setting.val_batches * 8} held-out windows; parameters are those without embedding and head."
    )
    report.table(
        ["text", "width", "parameters", "bits per byte", "PyTorch"],
        [[name, width, f"{inner:,}", f"{b:.4f}", f"{p:.4f}" if p else ""] for name, width, inner, b, p in rows],
    )
    report.table(
        ["text", "", "fitted line", "largest residual"],
        [
            [name, who, f"{c:.3f} · parameters^{e:.4f}", f"{100 * residual:.1f} %"]
            for (name, who), (c, e, residual) in fits.items()
        ],
    )
    for name in names:
        values = [r[3] for r in rows if r[0] == name]
        falls = all(a > b for a, b in zip(values, values[1:]))
        report.add(f"{name}: every wider model is better", "yes" if falls else "no", "yes", falls)
        if (name, "PyTorch") not in fits:
            continue
        worst = max(abs(r[3] - r[4]) / r[4] for r in rows if r[0] == name)
        report.add(
            f"{name}: bits per byte, largest relative difference from PyTorch",
            f"{worst:.1e}",
            f"<= {SCALING_BOUND}",
            worst <= SCALING_BOUND,
        )
        a, b = fits[name, "this program"][1], fits[name, "PyTorch"][1]
        report.add(
            f"{name}: exponent {a:.4f}, PyTorch {b:.4f}; relative difference",
            f"{abs(a / b - 1):.1e}",
            "<= 0.05",
            abs(a / b - 1) <= 0.05,
        )
    report.panels.append(scaling_panel(rows, fits, steps))
    report.finish(args, runs)


def byte_tokens(args, name):
    """A text as bytes: its tokenizer has no more tokens than the bytes and the special ones."""
    folder = args.work / "bytes" / name
    log = args.work / "logs" / f"bytes-{name}"
    run(
        [TOP / "dev" / "data" / "text.sh", folder, args.texts / name / "text"],
        log,
        env=os.environ | {"VOCAB_SIZE": str(SPECIAL + 256)},
    )
    return folder


def bits(result, setting):
    """Bits per byte of the held-out windows: the targets that end a document have no bytes."""
    targets = held_out(setting)[:, :, 1:]
    return result["val"][-1][1] / math.log(2) * targets.numel() / int((targets < SPECIAL).sum())


def fit(points):
    """Least squares of log(bits) against log(parameters): coefficient, exponent, largest relative residual."""
    x, y = numpy.log([p for p, _ in points]), numpy.log([b for _, b in points])
    exponent, constant = numpy.polyfit(x, y, 1)
    residual = numpy.abs(numpy.exp(y - constant - exponent * x) - 1).max()
    return math.exp(constant), float(exponent), float(residual)


def scaling_panel(rows, fits, steps):
    colors = dict(zip(TEXTS, ("ours", "second", "litgpt")))
    series = []
    for (name, who), (c, e, _) in fits.items():
        mine = who == "this program"
        points = [(r[2], r[3 if mine else 4]) for r in rows if r[0] == name]
        xs = [p for p, _ in points]
        color = COLORS[colors[name] if mine else "transformers"]
        series.append(dict(label=f"{name}, {who}", color=color, xs=xs, ys=[b for _, b in points], dots=1))
        series.append(dict(label="", color=color, xs=xs, ys=[c * x**e for x in xs], dash="" if mine else "5 4"))
    return dict(
        title=f"Held-out text after {steps} steps",
        x="parameters without embedding and head",
        y="bits per byte",
        log_x=1,
        log_y=1,
        series=series,
    )


# ---------------------------------------------------------------------------
# muon: steps to the same loss

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
MUON_EVERY = 20  # steps between validations


def muon(args, runs):
    report = Report("muon", "AdamW and Muon")
    steps = args.steps or 300
    rows = []
    for name in [t for t in TEXTS if not args.only or t in args.only]:
        curves = {}
        for optimizer in ("adamw", "muon"):
            for lr in RATES:
                setting = Setting(
                    args.texts / name,
                    TINY,
                    steps,
                    args.seeds[0],
                    lr=lr,
                    min_lr=lr / 10,
                    batch=args.batch,
                    seq=args.seq,
                    val_every=MUON_EVERY,
                    val_batches=25,
                )
                curves[optimizer, lr] = ours(runs, setting, optimizer=optimizer)["val"]
        rows += [[name, optimizer, f"{lr:g}", f"{val[-1][1]:.4f}"] for (optimizer, lr), val in curves.items()]
        best = best_rates(report, name, curves)
        steps_to_same_loss(report, name, best)
        report.panels.append(muon_panel(name, best))
    report.text(
        f"The preset `tiny`, {steps} steps of {args.batch} windows of {args.seq} tokens, one rate for all parameters, "
        f"validation on the same {25 * args.batch} held-out windows every {MUON_EVERY} steps. Each optimizer has the "
        f"best of {len(RATES)} rates."
    )
    report.table(["text", "optimizer", "rate", "held-out loss"], rows)
    report.finish(args, runs)


def best_rates(report, name, curves):
    """The validation losses of each optimizer at its best rate, which must lie inside the sweep."""
    best = {}
    for optimizer in ("adamw", "muon"):
        finals = {lr: val[-1][1] for (o, lr), val in curves.items() if o == optimizer and math.isfinite(val[-1][1])}
        rate = min(finals, key=finals.get)
        best[optimizer] = curves[optimizer, rate]
        inside = RATES[0] < rate < RATES[-1]
        report.add(f"{name}, {optimizer}: best rate", f"{rate:g}", "between the least and the largest tried", inside)
    return best


def steps_to_same_loss(report, name, best):
    target, steps = best["adamw"][-1][1], best["adamw"][-1][0]
    reached = next((step for step, loss in best["muon"] if loss <= target), None)
    report.add(
        f"{name}: steps of {steps} after which Muon has reached AdamW's best loss, {target:.4f}",
        f"{reached or 'not reached'}",
        f"< {steps}",
        bool(reached) and reached < steps,
    )


def muon_panel(name, best):
    colors = {"adamw": COLORS["transformers"], "muon": COLORS["ours"]}
    series = [
        dict(label=optimizer, color=colors[optimizer], xs=[step for step, _ in val], ys=[loss for _, loss in val])
        for optimizer, val in best.items()
    ]
    return dict(title=f"{name}: each optimizer at its best rate", x="step", y="held-out loss", series=series)


# ---------------------------------------------------------------------------

COMMANDS = {"compare": compare, "chaos": chaos, "nanogpt": nanogpt, "scaling": scaling, "muon": muon}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--work", type=Path, default=TOP / "out" / "learn", help="runs are kept here")
    parser.add_argument("--texts", type=Path, default=TOP / "data" / "texts", help="what dev/data/texts.sh wrote")
    parser.add_argument(
        "--out", type=Path, help="write the section into this file (Markdown), and its picture (SVG) next to it"
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of each run; 0: the command's own")
    parser.add_argument("--seeds", type=lambda s: [int(n) for n in s.split(",")], default=[], help="such as 1,2,3")
    parser.add_argument(
        "--only",
        type=lambda s: s.split(","),
        default=[],
        help="compare: contestants; chaos: precisions; scaling, muon: texts",
    )
    parser.add_argument("--batch", type=int, default=0, help="windows a step; 0: the command's own")
    parser.add_argument("--seq", type=int, default=0, help="tokens a window; 0: the command's own")
    parser.add_argument("--threads", type=int, default=1, help="of each contestant")
    parser.add_argument(
        "--pytorch-texts", type=lambda s: s.split(","), default=["bible"], help="scaling: PyTorch's texts"
    )
    parser.add_argument("--nanogpt", type=Path, help="nanogpt: a clone of github.com/karpathy/nanoGPT")
    parser.add_argument("--shakespeare", type=Path, help="nanogpt: its input.txt, instead of novels")
    args = parser.parse_args()
    args.seeds = args.seeds or {"chaos": [1, 2, 3, 4, 5], "nanogpt": [1, 2, 3]}.get(args.command, [1])
    own_batch, own_seq = STABLE if args.command == "compare" else (4, 128)
    args.batch, args.seq = args.batch or own_batch, args.seq or own_seq
    args.texts, args.work = args.texts.resolve(), args.work.resolve()
    if not (args.texts / "bible" / "train.tok").is_file():
        sys.exit(f"error: there are no texts in {args.texts}; make them: dev/data/texts.sh {args.texts}")
    torch.set_num_threads(args.threads)
    COMMANDS[args.command](args, Runs(args.work, args.threads))


if __name__ == "__main__":
    main()
